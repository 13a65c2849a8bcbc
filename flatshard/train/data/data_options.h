#pragma once

#include <cstdint>
#include <vector>

#include "flatshard/data/packing/packing.h"
#include "flatshard/data/token_source.h"

namespace flatshard {

/// The datasets of a run, and how they become sequences.
struct DataOptions {
  std::vector<data::SourceChoice> train;
  std::vector<data::SourceChoice> validation;  ///< empty: datasets of `train`
  data::PackingOptions packing;                ///< has the sequences' length
  std::uint64_t seed = 0;
  std::int64_t global_batch_size = 1;
  std::int64_t vocab_size = 0;
  bool validates = true;
  std::int64_t validation_sequences = -1;  ///< -1: all
};

}  // namespace flatshard
