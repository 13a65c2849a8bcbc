#include "flatshard/data/loader.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/permutation.h"

namespace flatshard::data {

Loader::Loader(std::shared_ptr<const TokenSource> source, LoaderOptions options)
    : source_(std::move(source)), options_(options) {
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
  FLATSHARD_CHECK(
      source_->vocab_size() <= options.vocab_size,
      config,
      "the corpus has a vocabulary of {} tokens, but model.vocab_size is {}; "
      "set model.vocab_size to at least {}",
      source_->vocab_size(),
      options.vocab_size,
      source_->vocab_size());
  num_sequences_ = source_->num_sequences(options.seq_len);
  FLATSHARD_CHECK(
      num_sequences_ >= 1,
      config,
      "one sequence needs training.seq_len + 1 = {} tokens, got {}; lower "
      "seq_len or prepare a larger corpus",
      options.seq_len + 1,
      source_->describe());
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

std::int64_t Loader::sequence_of(std::int64_t sample) const {
  const std::int64_t epoch = sample / num_sequences_;
  const std::int64_t position = sample % num_sequences_;
  if (!options_.shuffle) {
    return position;
  }
  const std::uint64_t key = mix_keys(
      mix_keys(options_.seed, stable_hash("loader order")),
      static_cast<std::uint64_t>(epoch));
  return Permutation(key, num_sequences_)(position);
}

std::vector<std::int64_t> Loader::sequences(const BatchSlot& slot) const {
  const std::int64_t first = first_sample(slot);
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < slot.local_batch; ++i) {
    all.push_back(sequence_of(first + i));
  }
  return all;
}

void Loader::read(
    const BatchSlot& slot,
    std::span<std::int64_t> tokens,
    std::span<std::int64_t> targets) const {
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
  std::vector<std::int64_t> buffer(static_cast<std::size_t>(seq_len + 1));
  auto token_out = tokens.begin();
  auto target_out = targets.begin();
  for (const std::int64_t sequence : sequences(slot)) {
    source_->read(sequence, buffer);
    const auto worst = std::max_element(buffer.begin(), buffer.end());
    FLATSHARD_CHECK(
        *worst < options_.vocab_size,
        format,
        "token {} at place {} of sequence {} ({}) is beyond model.vocab_size = "
        "{}; the corpus is damaged, prepare it again",
        *worst,
        worst - buffer.begin(),
        sequence,
        source_->describe(),
        options_.vocab_size);
    token_out = std::copy(buffer.begin(), buffer.end() - 1, token_out);
    target_out = std::copy(buffer.begin() + 1, buffer.end(), target_out);
  }
}

LoaderState Loader::state() const {
  return {options_.seed, options_.seq_len, num_sequences_, samples_consumed_};
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
      state.num_sequences == num_sequences_,
      config,
      "the saved data order belongs to a corpus of {} sequences, got one of "
      "{}; data.train is another folder or was prepared again",
      state.num_sequences,
      num_sequences_);
  FLATSHARD_CHECK(
      state.samples_consumed >= 0,
      format,
      "expected samples_consumed >= 0, got {}",
      state.samples_consumed);
  samples_consumed_ = state.samples_consumed;
}

}  // namespace flatshard::data
