#pragma once

#include "flatshard/train/config/parallelism_keys.h"

#include <cstdint>

namespace flatshard::config {

/// Returns the number of ranks that have parts of the experts of a layer, and
/// exchange tokens.
inline std::int64_t expert_ranks(const Parallelism& p) {
  return p.expert_parallel_degree * p.expert_tensor_parallel_degree;
}

/// Returns the number of data ranks in the group of each rank of
/// tensor_parallel_degree: they divide data_parallel_shard_degree.
inline std::int64_t expert_data_ranks(const Parallelism& p) {
  return p.expert_tensor_parallel_degree == 1
             ? p.expert_parallel_degree
             : expert_ranks(p) / p.tensor_parallel_degree;
}

}  // namespace flatshard::config
