#include "flatshard/data/loader.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/permutation.h"

namespace flatshard::data {
namespace {

std::vector<double> weights_of(const std::vector<WeightedSource>& sources) {
  std::vector<double> weights;
  for (const WeightedSource& source : sources) {
    weights.push_back(source.weight);
  }
  return weights;
}

std::string describe_packing(std::int64_t documents_per_sample) {
  return documents_per_sample == 0 ? "data.packing = \"stream\""
                                   : fmt::format(
                                         "data.packing = \"documents\" with "
                                         "data.documents_per_sample = {}",
                                         documents_per_sample);
}

/// "a mixture of 75.00% of 12 sequences and 25.00% of 30"
std::string describe(const std::vector<LoaderState::Part>& parts) {
  std::string text = parts.empty() ? "one dataset" : "a mixture of ";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += fmt::format(
        "{}{:.2f}% of {} sequences",
        i == 0 ? "" : ", ",
        100 * static_cast<double>(parts[i].share) * 0x1p-32,
        parts[i].num_sequences);
  }
  return text;
}

}  // namespace

Loader::Loader(std::shared_ptr<const TokenSource> source, LoaderOptions options)
    : Loader(
          std::vector<WeightedSource>{{.source = std::move(source)}},
          options) {
}

Loader::Loader(std::vector<WeightedSource> sources, LoaderOptions options)
    : sources_(std::move(sources)),
      options_(options),
      mixture_(weights_of(sources_)) {
  FLATSHARD_CHECK(
      options.seq_len >= 1,
      config,
      "training.seq_len: expected at least 1, got {}",
      options.seq_len);
  FLATSHARD_CHECK(
      options.global_batch_size >= 1,
      config,
      "training.global_batch_size: expected at least 1, got {}",
      options.global_batch_size);
  for (const auto& [source, weight] : sources_) {
    FLATSHARD_CHECK(
        source->vocab_size() <= options.vocab_size,
        config,
        "the dataset has a vocabulary of {} tokens, but model.vocab_size is "
        "{}; set model.vocab_size to at least {}",
        source->vocab_size(),
        options.vocab_size,
        source->vocab_size());
    const std::int64_t num_sequences = source->num_sequences(options.seq_len);
    FLATSHARD_CHECK(
        num_sequences >= 1,
        config,
        "one sequence needs {} tokens, got {}; lower seq_len or prepare a "
        "larger dataset",
        source->packing()
            ? "a document of at least 2"
            : fmt::format("training.seq_len + 1 = {}", options.seq_len + 1),
        source->describe());
    first_sequence_.push_back(first_sequence_.back() + num_sequences);
  }
}

std::int64_t Loader::num_microbatches(int world, std::int64_t local_batch)
    const {
  FLATSHARD_CHECK(
      world >= 1 && local_batch >= 1 &&
          options_.global_batch_size % (local_batch * world) == 0,
      config,
      "training.global_batch_size = {} must be a multiple of local_batch_size "
      "* ranks = {} * {}",
      options_.global_batch_size,
      local_batch,
      world);
  return options_.global_batch_size / (local_batch * world);
}

void Loader::set_global_batch_size(std::int64_t size) {
  FLATSHARD_CHECK(
      size >= 1,
      config,
      "training.global_batch_size: expected at least 1, got {}",
      size);
  options_.global_batch_size = size;
}

std::int64_t Loader::first_sample(const BatchSlot& slot) const {
  const std::int64_t count = num_microbatches(slot.world, slot.local_batch);
  FLATSHARD_CHECK(
      slot.rank >= 0 && slot.rank < slot.world && slot.microbatch >= 0 &&
          slot.microbatch < count,
      usage,
      "expected rank in [0, {}) and microbatch in [0, {}), got {} and {}",
      slot.world,
      count,
      slot.rank,
      slot.microbatch);
  return samples_consumed_ +
         (slot.rank * count + slot.microbatch) * slot.local_batch;
}

Mixture::Turn Loader::sequence_of(std::int64_t sample) const {
  const auto [source, index] = mixture_(sample);
  const std::int64_t num_sequences =
      first_sequence_[source + 1] - first_sequence_[source];
  const std::int64_t epoch = index / num_sequences;
  const std::int64_t position = index % num_sequences;
  if (!options_.shuffle) {
    return {source, position};
  }
  std::uint64_t key = mix_keys(
      mix_keys(options_.seed, stable_hash("loader order")),
      static_cast<std::uint64_t>(epoch));
  if (source > 0) {
    key = mix_keys(key, source);
  }
  return {source, Permutation(key, num_sequences)(position)};
}

std::vector<std::int64_t> Loader::sequences(const BatchSlot& slot) const {
  const std::int64_t first = first_sample(slot);
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < slot.local_batch; ++i) {
    const auto [source, sequence] = sequence_of(first + i);
    all.push_back(first_sequence_[source] + sequence);
  }
  return all;
}

void Loader::read(
    const BatchSlot& slot,
    std::span<std::int64_t> tokens,
    std::span<std::int64_t> targets,
    DocumentLengths* documents) const {
  const std::int64_t seq_len = options_.seq_len;
  const std::int64_t numel = slot.local_batch * seq_len;
  FLATSHARD_CHECK(
      static_cast<std::int64_t>(tokens.size()) == numel &&
          static_cast<std::int64_t>(targets.size()) == numel,
      usage,
      "expected tokens and targets of local_batch * seq_len = {} elements, got "
      "{} and {}",
      numel,
      tokens.size(),
      targets.size());
  read_samples(first_sample(slot), tokens, targets, documents);
}

void Loader::read_samples(
    std::int64_t first,
    std::span<std::int64_t> tokens,
    std::span<std::int64_t> targets,
    DocumentLengths* documents) const {
  const std::int64_t seq_len = options_.seq_len;
  const auto numel = static_cast<std::int64_t>(tokens.size());
  FLATSHARD_CHECK(
      first >= 0 && numel % seq_len == 0 && targets.size() == tokens.size(),
      usage,
      "expected a sample of at least 0 and as many tokens as targets, a "
      "multiple of seq_len = {}, got {}, {} and {}",
      seq_len,
      first,
      numel,
      targets.size());
  const auto row_size = static_cast<std::size_t>(seq_len);
  for (std::int64_t i = 0; i < numel / seq_len; ++i) {
    const auto [number, sequence] = sequence_of(first + i);
    const TokenSource& source = *sources_[number].source;
    const std::size_t at = static_cast<std::size_t>(i) * row_size;
    const Sequence out{
        tokens.subspan(at, row_size),
        targets.subspan(at, row_size),
        documents};
    source.read(sequence, out);
    const auto check = [&](std::span<std::int64_t> row, std::int64_t place) {
      const auto worst = std::ranges::max_element(row);
      FLATSHARD_CHECK(
          *worst < options_.vocab_size,
          format,
          "token {} at place {} of sequence {} ({}) is beyond "
          "model.vocab_size = {}; the dataset is damaged, prepare it again",
          *worst,
          worst - row.begin() + place,
          sequence,
          source.describe(),
          options_.vocab_size);
    };
    check(out.tokens, 0);
    check(out.targets, 1);
  }
}

bool Loader::ignores_targets() const {
  return std::ranges::any_of(sources_, [](const WeightedSource& weighted) {
    return weighted.source->ignores_targets();
  });
}

bool Loader::step_has_targets() const {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(options_.seq_len));
  std::vector<std::int64_t> targets(tokens.size());
  for (std::int64_t i = 0; i < options_.global_batch_size; ++i) {
    read_samples(samples_consumed_ + i, tokens, targets);
    const bool has_targets = std::ranges::any_of(
        targets,
        [](std::int64_t target) { return target != kIgnoredTarget; });
    if (has_targets) {
      return true;
    }
  }
  return false;
}

LoaderState Loader::state() const {
  LoaderState state{
      .seed = options_.seed,
      .seq_len = options_.seq_len,
      .num_sequences = num_sequences(),
      .samples_consumed = samples_consumed_,
      .documents_per_sample = options_.documents_per_sample};
  for (std::size_t i = 0; i < sources_.size() && sources_.size() > 1; ++i) {
    state.parts.push_back(
        {.num_sequences = first_sequence_[i + 1] - first_sequence_[i],
         .share = mixture_.shares()[i]});
  }
  return state;
}

void Loader::restore(const LoaderState& state) {
  FLATSHARD_CHECK(
      state.seed == options_.seed,
      config,
      "the saved data order belongs to run.seed = {}, got {}; set run.seed to "
      "the saved one",
      state.seed,
      options_.seed);
  FLATSHARD_CHECK(
      state.seq_len == options_.seq_len,
      config,
      "the saved data order belongs to training.seq_len = {}, got {}",
      state.seq_len,
      options_.seq_len);
  FLATSHARD_CHECK(
      state.documents_per_sample == options_.documents_per_sample,
      config,
      "the saved data order belongs to {}, got {}; set data.packing and "
      "data.documents_per_sample to the saved ones",
      describe_packing(state.documents_per_sample),
      describe_packing(options_.documents_per_sample));
  const std::vector<LoaderState::Part> parts = this->state().parts;
  FLATSHARD_CHECK(
      state.parts == parts,
      config,
      "the saved data order belongs to {}, got {}; data.train has other "
      "datasets or weights, or lists them in another order; "
      "checkpoint.exclude = \"loader\" starts the new ones at the first sample",
      describe(state.parts),
      describe(parts));
  FLATSHARD_CHECK(
      state.num_sequences == num_sequences(),
      config,
      "the saved data order belongs to a dataset of {} sequences, got one of "
      "{}; data.train is another folder or was prepared again",
      state.num_sequences,
      num_sequences());
  FLATSHARD_CHECK(
      state.samples_consumed >= 0,
      format,
      "expected samples_consumed >= 0, got {}",
      state.samples_consumed);
  samples_consumed_ = state.samples_consumed;
}

}  // namespace flatshard::data
