#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/moe/gate.h"
#include "flatshard/moe/router_args.h"
#include "flatshard/nn/kernels/kernels.h"

/// CUDA kernels of Mixture of Experts; as kernels.h.
namespace flatshard::nn::kernels {

/// The limits of the router and the sort.
constexpr std::int64_t kMaxExperts = 1024;
/// Its scores have to fit shared memory next to them.
constexpr std::int64_t kMaxRouterGroups = 256;

void router_forward(const RouterForward& args, cudaStream_t stream);
void router_backward(const RouterBackward& args, cudaStream_t stream);

/// Adds to counts [num_experts].
void count_experts(
    const std::int32_t* experts,
    std::int64_t pairs,
    std::int64_t num_experts,
    std::int32_t* counts,
    cudaStream_t stream);

/// Pairs that a block of the sort takes.
constexpr std::int64_t kSortPairs = 256;

struct SortByExpert {
  const std::int32_t* experts;  ///< [pairs]
  const std::int32_t* counts;   ///< [num_experts]
  /// Scratch: [blocks, num_experts + 1] with blocks = ceil(pairs / kSortPairs).
  std::int32_t* bases;
  std::int32_t* order;    ///< [pairs]
  std::int32_t* inverse;  ///< [pairs]
  std::int64_t pairs;
  std::int64_t num_experts;
};
void sort_by_expert(const SortByExpert& args, cudaStream_t stream);

struct PlaceRows {
  const std::int32_t* order;  ///< [rows]
  const std::int32_t* runs;   ///< [2, num_runs + 1]
  std::int32_t* of_rows;      ///< [rows]
  std::int32_t* of_pairs;     ///< [rows]
  int num_runs;
  std::int64_t num_rows;  ///< later ones are dropped
  std::int64_t rows;
};
/// See nn::RowPlaces.
void row_places(const PlaceRows& args, cudaStream_t stream);

struct PermuteRows {
  const void* x;               ///< [tokens, dim]
  const std::int32_t* order;   ///< [rows]
  const std::int32_t* places;  ///< [rows], RowPlaces::of_rows, or null
  void* out;                   ///< [rows, dim], of rows that leave
  void* staying;               ///< [any, dim], or null without places
  std::int64_t rows;
  std::int64_t dim;
  std::int64_t per_token;
  Dtype dtype;
};
void permute_rows(const PermuteRows& args, cudaStream_t stream);

struct SumRows {
  const void* rows;            ///< [rows, dim]
  const void* staying;         ///< [any, dim], or null: all are in `rows`
  const std::int32_t* places;  ///< [tokens, slots], see RowPlaces::of_pairs
  const void* addend;          ///< [tokens, dim] or null
  void* out;                   ///< [tokens, dim]
  std::int64_t tokens;
  std::int64_t slots;
  std::int64_t dim;
  Dtype dtype;
};
void sum_rows(const SumRows& args, cudaStream_t stream);

struct WeightedGate {
  const void* dy;        ///< [rows, dim], of the backward
  const void* gate_up;   ///< [rows, 2 * dim]
  const float* weights;  ///< [rows]
  void* y;               ///< [rows, dim]; in the backward it may be dy
  void* dgate_up;        ///< [rows, 2 * dim]
  float* dweights;       ///< [rows]
  std::int64_t rows;
  std::int64_t dim;
  Dtype dtype;
  Gate gate;  ///< silu or clamped_silu
};
void weighted_gate_forward(const WeightedGate& args, cudaStream_t stream);
void weighted_gate_backward(const WeightedGate& args, cudaStream_t stream);

struct ExpertBiases {
  const void* bias;          ///< [experts, dim]
  const std::int32_t* ends;  ///< [num_groups]; see Groups
  int num_groups;
  int per_expert;
  void* rows;            ///< [num_rows, dim]
  const float* factors;  ///< [num_rows], or null: 1
  float* dots;           ///< [num_rows]
  std::int64_t num_rows;
  std::int64_t dim;
  Dtype dtype;
};
// Rows after the last end are neither read nor written.

/// rows[r] += factors[r] * bias of r's expert.
void add_expert_biases(const ExpertBiases& args, cudaStream_t stream);
/// dots[r] += the dot product of rows[r] and the bias of r's expert.
void add_expert_bias_dots(const ExpertBiases& args, cudaStream_t stream);

}  // namespace flatshard::nn::kernels
