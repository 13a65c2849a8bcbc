#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "flatshard/data/mixture.h"
#include "flatshard/data/token_source.h"

namespace flatshard::data {

struct LoaderOptions {
  std::uint64_t seed = 0;
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;  ///< sequences per step, all ranks
  std::int64_t vocab_size = 0;         ///< of the model; tokens are below it
  bool shuffle = true;                 ///< false: in order, for validation
  /// The sources' number, in the saved position; 0: a stream.
  std::int64_t documents_per_sample = 0;
};

/// Selects the part of a step that one call of `Loader::read` returns.
struct BatchSlot {
  int rank = 0;
  int world = 1;
  std::int64_t local_batch = 1;  ///< sequences per microbatch and rank
  std::int64_t microbatch = 0;
};

/// Everything a resumed run needs. All but samples_consumed identify the order
/// in use and are checked. That is the position.
struct LoaderState {
  /// A source of a mixture.
  struct Part {
    std::int64_t num_sequences = 0;
    std::int64_t share = 0;  ///< see Mixture::shares

    bool operator==(const Part&) const = default;
  };

  std::uint64_t seed = 0;
  std::int64_t seq_len = 0;
  std::int64_t num_sequences = 0;
  std::int64_t samples_consumed = 0;
  std::vector<Part> parts;  ///< empty: one source
  /// PackingOptions::max_documents; 0: Packing::stream.
  std::int64_t documents_per_sample = 0;

  bool operator==(const LoaderState&) const = default;
};

/// Deterministic loader of sequences.
///
/// Sample g of a run (g counts from 0 over all steps) is sequence
/// permutation(seed, epoch)(g mod n) of the source. It has n sequences, and
/// epoch = g div n. A step consists of the next `global_batch_size` samples.
/// Its samples depend only on the seed and the step, never on the number of
/// ranks or the local batch.
///
/// With several sources, Mixture chooses the source of sample g and that
/// source's sample, counted as g is above. Each source has separate
/// permutations and epochs. Its sequences are numbered after the sequences of
/// the source before.
///
/// Assignment is rank-major: with M = global_batch_size / (local_batch * world)
/// microbatches, rank r reads samples (r * M + m) * local_batch + i of the step
/// in microbatch m. N ranks with one microbatch each therefore read the same
/// batches as one rank with N microbatches, in rank order.
class Loader {
 public:
  /// @throws Error{config} if a number is not positive, if the source has no
  /// full sequence, or if its vocabulary is larger than the model's vocabulary.
  Loader(std::shared_ptr<const TokenSource> source, LoaderOptions options);
  /// The same with sequences of several sources, by their weights.
  Loader(std::vector<WeightedSource> sources, LoaderOptions options);

  const LoaderOptions& options() const { return options_; }
  const std::vector<WeightedSource>& sources() const { return sources_; }
  /// Returns the number of sequences of all sources.
  std::int64_t num_sequences() const { return first_sequence_.back(); }
  std::int64_t epoch() const { return samples_consumed_ / num_sequences(); }
  /// Returns whether some source has targets without loss.
  bool ignores_targets() const;
  /// Returns whether a sequence of the current step has a target with a loss.
  /// Reads its sequences up to the first that has one.
  bool step_has_targets() const;

  /// Returns the number of microbatches per step. @throws Error{config} when
  /// global_batch_size is not a multiple of local_batch * world.
  std::int64_t num_microbatches(int world, std::int64_t local_batch) const;

  /// Fills tokens and targets, each [local_batch, seq_len] row-major, with the
  /// slot's part of the current step; see Sequence. Does not move the position,
  /// so ranks and microbatches may be read in any order.
  /// @param documents  if not null: the sequences' documents are appended.
  /// @throws Error{usage} on a wrong size or slot, Error{format} on a token
  /// that the model's vocabulary does not have.
  void read(
      const BatchSlot& slot,
      std::span<std::int64_t> tokens,
      std::span<std::int64_t> targets,
      DocumentLengths* documents = nullptr) const;

  /// Fills tokens and targets, each [n, seq_len] row-major, with the samples
  /// [first, first + n) of the run, wherever the position is. Same errors.
  void read_samples(
      std::int64_t first,
      std::span<std::int64_t> tokens,
      std::span<std::int64_t> targets,
      DocumentLengths* documents = nullptr) const;

  /// Returns the number in the run of the first sample that `read` would give.
  std::int64_t first_sample(const BatchSlot& slot) const;
  /// Returns the sequence numbers that `read` would use, in its order.
  std::vector<std::int64_t> sequences(const BatchSlot& slot) const;

  /// The size of the steps from here on. @throws Error{config} below 1.
  void set_global_batch_size(std::int64_t size);
  /// Continues to the next step.
  void advance() { samples_consumed_ += options_.global_batch_size; }

  LoaderState state() const;
  /// @throws Error{config} if the state belongs to another seed, sequence
  /// length, dataset or data mix, naming both values.
  void restore(const LoaderState& state);

 private:
  /// Returns the source of a sample, and its sequence there.
  Mixture::Turn sequence_of(std::int64_t sample) const;

  std::vector<WeightedSource> sources_;
  LoaderOptions options_;
  Mixture mixture_;
  /// The first sequence of each source, counted over all of them; then the
  /// number of sequences.
  std::vector<std::int64_t> first_sequence_{0};
  std::int64_t samples_consumed_ = 0;
};

}  // namespace flatshard::data
