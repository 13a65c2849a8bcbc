#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/train/data/data_options.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// Sequences that every validation of a run reads: the first ones of a
/// validation split, for any batch size and number of ranks. A data mix has one
/// set per dataset, with its fraction of the sequences.
struct ValidationSet {
  std::string path;     ///< folder of the dataset
  double share = 1;     ///< in the loss of the mixture; their sum is 1
  data::Loader loader;  ///< in order
  std::int64_t num_sequences = 0;
  bool is_bytes = false;  ///< see TokenSource::tokens_are_bytes
  std::string option;     ///< key of the dataset, for errors

  /// Numbers of targets.
  struct Counts {
    std::int64_t targets = 0;  ///< not ignored by the loss
    std::int64_t bytes = 0;    ///< targets that are bytes

    Counts& operator+=(const Counts& other) {
      targets += other.targets;
      bytes += other.bytes;
      return *this;
    }
  };

  /// Fills the first `count` rows of tokens and targets, each [n, seq_len],
  /// with the sequences [first, first + count); the loss ignores the others.
  /// @param documents  if not null: the documents of all rows are appended; a
  ///   row that the loss ignores is padding.
  void read(
      std::int64_t first,
      std::int64_t count,
      std::span<std::int64_t> tokens,
      std::span<std::int64_t> targets,
      data::DocumentLengths* documents = nullptr) const;
  /// Counts some targets of `read`.
  Counts count(std::span<const std::int64_t> targets) const;
};

/// Empty unless the run validates. @throws as data::open_token_sources, with
/// the name of the option; Error{config} to validate on all of random tokens.
std::vector<ValidationSet> open_validation_sets(const DataOptions& options);

/// The loss of a mixture is the mean of its sets' by their shares.
/// @param sums  for each set: the sum of its targets' losses in nats, the
///   number of its targets, and the number of bytes among them.
ValidationMetrics summarize(
    const std::vector<ValidationSet>& sets,
    std::int64_t step,
    std::span<const double> sums);

}  // namespace flatshard
