#include "flatshard/data/token_source.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"

namespace flatshard::data {
namespace {

// "As many as anyone wants": far beyond any run, and still exact in a double.
constexpr std::int64_t kRandomSequences = std::int64_t{1} << 48;

}  // namespace

CorpusSource::CorpusSource(std::shared_ptr<const Corpus> corpus)
    : corpus_(std::move(corpus)) {
}

std::int64_t CorpusSource::num_sequences(std::int64_t seq_len) const {
  return corpus_->num_tokens() > 0 ? (corpus_->num_tokens() - 1) / seq_len : 0;
}

void CorpusSource::read(std::int64_t index, std::span<std::int64_t> out) const {
  const auto seq_len = static_cast<std::int64_t>(out.size()) - 1;
  corpus_->read(index * seq_len, out);
}

std::int64_t CorpusSource::vocab_size() const {
  return corpus_->vocab_size();
}

std::string CorpusSource::describe() const {
  return fmt::format(
      "split '{}' of {} tokens",
      corpus_->split(),
      corpus_->num_tokens());
}

bool CorpusSource::tokens_are_bytes() const {
  return corpus_->meta().tokenizer == "bytes";
}

RandomTokens::RandomTokens(std::uint64_t seed, std::int64_t vocab_size)
    : key_(mix_keys(seed, stable_hash("random tokens"))),
      vocab_size_(vocab_size) {
  FLATSHARD_CHECK(
      vocab_size >= 1 && vocab_size <= (std::int64_t{1} << 32),
      config,
      "random tokens: expected model.vocab_size in [1, 2^32], got {}",
      vocab_size);
}

std::int64_t RandomTokens::num_sequences(std::int64_t /*seq_len*/) const {
  return kRandomSequences;
}

void RandomTokens::read(std::int64_t index, std::span<std::int64_t> out) const {
  const Philox philox(key_);
  const auto vocab = static_cast<std::uint64_t>(vocab_size_);
  for (std::size_t i = 0; i < out.size(); i += 4) {
    const auto words = philox(i / 4, static_cast<std::uint64_t>(index));
    for (std::size_t j = i; j < out.size() && j < i + 4; ++j) {
      out[j] = static_cast<std::int64_t>((words[j - i] * vocab) >> 32);
    }
  }
}

std::shared_ptr<const TokenSource> open_token_source(
    const std::string& train_or_folder,
    const std::string& split,
    std::uint64_t seed,
    std::int64_t vocab_size) {
  FLATSHARD_CHECK(
      !train_or_folder.empty(),
      config,
      "data.train: expected a corpus folder or \"random\", got nothing");
  if (train_or_folder == "random") {
    return std::make_shared<RandomTokens>(
        mix_keys(seed, stable_hash(split)),
        vocab_size);
  }
  return std::make_shared<CorpusSource>(Corpus::open(train_or_folder, split));
}

}  // namespace flatshard::data
