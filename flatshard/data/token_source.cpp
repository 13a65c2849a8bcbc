#include "flatshard/data/token_source.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/data/packing/packed_documents.h"

namespace flatshard::data {
namespace {

// Unlimited in practice: beyond any run, and still exact in a double.
constexpr std::int64_t kRandomSequences = std::int64_t{1} << 48;

}  // namespace

void read_run(const Corpus& corpus, std::int64_t first, const Sequence& out) {
  const std::size_t count = out.tokens.size();
  corpus.read(first, out.tokens);
  std::ranges::copy(out.tokens.subspan(1), out.targets.begin());
  corpus.read(
      first + static_cast<std::int64_t>(count),
      out.targets.subspan(count - 1));
  if (corpus.has_mask()) {
    std::vector<std::uint8_t> mask(count);
    corpus.read_mask(first + 1, mask);
    for (std::size_t i = 0; i < count; ++i) {
      out.targets[i] = mask[i] != 0 ? out.targets[i] : kIgnoredTarget;
    }
  }
}

bool has_trained_target(const Corpus& corpus, const Piece& run) {
  if (!corpus.has_mask()) {
    return run.length > 0;
  }
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(run.length));
  corpus.read_mask(run.first + 1, mask);
  return std::ranges::any_of(mask, [](std::uint8_t m) { return m != 0; });
}

CorpusSource::CorpusSource(std::shared_ptr<const Corpus> corpus)
    : corpus_(std::move(corpus)) {
}

std::int64_t CorpusSource::num_sequences(std::int64_t seq_len) const {
  return corpus_->num_tokens() > 0 ? (corpus_->num_tokens() - 1) / seq_len : 0;
}

void CorpusSource::read(std::int64_t index, const Sequence& out) const {
  const auto seq_len = static_cast<std::int64_t>(out.tokens.size());
  read_run(*corpus_, index * seq_len, out);
  if (out.documents != nullptr) {
    out.documents->lengths.push_back(seq_len);
    out.documents->padding.push_back(0);
  }
}

std::int64_t CorpusSource::num_untrained(std::int64_t seq_len) const {
  std::int64_t count = 0;
  for (std::int64_t i = 0; ignores_targets() && i < num_sequences(seq_len);
       ++i) {
    const bool trains =
        has_trained_target(*corpus_, {.first = i * seq_len, .length = seq_len});
    count += trains ? 0 : 1;
  }
  return count;
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

void RandomTokens::read(std::int64_t index, const Sequence& out) const {
  const Philox philox(key_);
  const auto vocab = static_cast<std::uint64_t>(vocab_size_);
  const std::size_t seq_len = out.tokens.size();
  for (std::size_t i = 0; i <= seq_len; i += 4) {
    const auto words = philox(i / 4, static_cast<std::uint64_t>(index));
    for (std::size_t j = i; j <= seq_len && j < i + 4; ++j) {
      const auto token =
          static_cast<std::int64_t>((words[j - i] * vocab) >> 32);
      if (j < seq_len) {
        out.tokens[j] = token;
      }
      if (j > 0) {
        out.targets[j - 1] = token;
      }
    }
  }
  if (out.documents != nullptr) {
    out.documents->lengths.push_back(static_cast<std::int64_t>(seq_len));
    out.documents->padding.push_back(0);
  }
}

namespace {

std::string tokenizer_json(const SourceChoice& corpus) {
  const MappedFile file(std::filesystem::path(corpus.path) / kTokenizerFile);
  return std::string(file.text());
}

/// A token id must have the same meaning in all datasets.
void check_same_tokenizer(const SourceChoice& a, const SourceChoice& b) {
  const CorpusMeta one = CorpusMeta::load(a.path);
  const CorpusMeta other = CorpusMeta::load(b.path);
  const bool same =
      one.tokenizer == other.tokenizer && one.vocab_size == other.vocab_size &&
      one.end_of_document == other.end_of_document &&
      (one.tokenizer == "bytes" || one.tokenizer == kNoTokenizer ||
       same_tokens(tokenizer_json(a), tokenizer_json(b), b.path));
  FLATSHARD_CHECK(
      same,
      config,
      "{} and {} were made with different tokenizers or end-of-document "
      "tokens (vocabularies of {} and {}); prepare them with the same",
      a.path,
      b.path,
      one.vocab_size,
      other.vocab_size);
}

}  // namespace

std::vector<WeightedSource> open_token_sources(
    const std::vector<SourceChoice>& choices,
    const std::string& split,
    std::uint64_t seed,
    std::int64_t vocab_size,
    const PackingOptions& packing) {
  FLATSHARD_CHECK(
      !choices.empty(),
      config,
      "data.train: set it to a dataset directory or \"random\"");
  std::vector<WeightedSource> sources;
  const SourceChoice* first = nullptr;
  for (const SourceChoice& choice : choices) {
    WeightedSource& opened = sources.emplace_back();
    opened.weight = choice.weight;
    if (choice.is_random()) {
      FLATSHARD_CHECK(
          packing.packing == Packing::stream,
          config,
          "data.packing = \"documents\": random tokens have no documents; set "
          "a dataset directory, or data.packing = \"stream\"");
      opened.source = std::make_shared<RandomTokens>(
          mix_keys(seed, stable_hash(split)),
          vocab_size);
      continue;
    }
    auto corpus = Corpus::open(choice.path, split);
    if (packing.packing == Packing::documents) {
      opened.source =
          std::make_shared<PackedDocuments>(std::move(corpus), packing);
    } else {
      opened.source = std::make_shared<CorpusSource>(std::move(corpus));
    }
    if (first == nullptr) {
      first = &choice;
    } else {
      check_same_tokenizer(*first, choice);
    }
  }
  return sources;
}

}  // namespace flatshard::data
