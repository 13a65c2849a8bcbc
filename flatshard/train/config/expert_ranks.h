#pragma once

#include "flatshard/train/config/parallelism_keys.h"

#include <cstdint>

namespace flatshard::config {

/// Returns the number of ranks that have parts of the experts of a layer, and
/// exchange tokens.
inline std::int64_t expert_ranks(const Parallelism& p) {
  return p.expert_parallel_degree * p.expert_tensor_parallel_degree;
}

/// Returns whether the ranks that share a sequence have different experts: they
/// are a part of the ranks of expert_parallel_degree then.
inline bool experts_span_sequences(const Parallelism& p) {
  return p.shares_sequences() &&
         p.expert_parallel_degree % p.context_parallel_degree == 0;
}

/// Returns the number of ranks in the group of each rank of
/// tensor_parallel_degree that read different samples: they divide
/// data_parallel_shard_degree.
inline std::int64_t expert_data_ranks(const Parallelism& p) {
  const std::int64_t ranks = p.expert_tensor_parallel_degree == 1
                                 ? p.expert_parallel_degree
                                 : expert_ranks(p) / p.tensor_parallel_degree;
  return experts_span_sequences(p) ? ranks / p.context_parallel_degree : ranks;
}

/// Returns how far apart adjacent ranks that share sequences are: by the ranks
/// of the axes inside, of tensor parallelism and of parts of experts that these
/// ranks divide.
inline std::int64_t context_rank_stride(const Parallelism& p) {
  return experts_span_sequences(p)
             ? p.tensor_parallel_degree * expert_data_ranks(p) *
                   p.context_parallel_degree / p.expert_parallel_degree
             : p.tensor_parallel_degree;
}

}  // namespace flatshard::config
