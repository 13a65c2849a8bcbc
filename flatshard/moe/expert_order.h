#pragma once

#include "flatshard/moe/permute.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::nn {

/// Counts how often each of `num_experts` experts is chosen.
///
/// @param experts  int32, any shape; larger numbers are not counted.
/// @return         int32 [num_experts]
at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts);

/// The rows of tokens whose experts a router outside of this folder chose.
struct ExpertOrder {
  Permutation permutation;
  at::Tensor counts;  ///< int32 [num_experts]
};

/// Sorts the choices by expert. No token is dropped.
///
/// @param experts  any integers [tokens, slots], in [0, num_experts).
/// @throws Error{usage} for another shape or dtype, and on CPUs for an expert
///   that does not exist.
ExpertOrder order_by_expert(
    const at::Tensor& experts,
    std::int64_t num_experts);

}  // namespace flatshard::nn
