#pragma once

#include <cstdint>
#include <variant>

#include "flatshard/moe/gate.h"
#include "flatshard/moe/router_args.h"
#include "flatshard/ops/kernels/dtype.h"

struct CUstream_st;

/// CUDA kernels of Mixture of Experts, each by its arguments: raw pointers of
/// one device, contiguous rows. Uses neither torch nor CUDA headers, so that a
/// build without CUDA can include it. See cuda_moe.h for the launches.
namespace flatshard::nn::kernels {

/// The limits of the router and the sort.
constexpr std::int64_t kMaxExperts = 1024;
/// Its scores have to fit shared memory next to them.
constexpr std::int64_t kMaxRouterGroups = 256;

/// Counts how often each expert occurs. Numbers outside [0, num_experts) are
/// not counted.
struct CountExperts {
  const std::int32_t* experts;  ///< [pairs]
  std::int32_t* counts;         ///< [num_experts], overwritten
  std::int64_t pairs;
  std::int64_t num_experts;
};

/// Pairs per block of the sort.
constexpr std::int64_t kSortPairs = 256;

/// See Permutation.
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

/// See nn::row_places.
struct PlaceRows {
  const std::int32_t* order;  ///< [rows]
  const std::int32_t* runs;   ///< [2, num_runs + 1]
  std::int32_t* of_rows;      ///< [rows]
  std::int32_t* of_pairs;     ///< [rows]
  int num_runs;
  std::int64_t num_rows;  ///< later ones are dropped
  std::int64_t rows;
};

/// See nn::permute_rows_into.
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

/// See nn::sum_rows_from. Rounds once.
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

/// y[r] = gated(gate, up) * weights[r] of rows of gate_up, or with a `dy` its
/// backward.
struct WeightedGate {
  const void* gate_up;        ///< [rows, 2 * dim]
  const float* weights;       ///< [rows]
  void* y;                    ///< [rows, dim]; in the backward it may be dy
  const void* dy = nullptr;   ///< [rows, dim]
  void* dgate_up = nullptr;   ///< [rows, 2 * dim]
  float* dweights = nullptr;  ///< [rows]
  std::int64_t rows;
  std::int64_t dim;
  Dtype dtype;
  Gate gate;  ///< silu or clamped_silu
};

/// rows[r] += factors[r] * the bias of r's expert, or with `dots` dots[r] +=
/// the dot product of rows[r] and that bias. Rows after the last end are
/// neither read nor written.
struct ExpertBiases {
  const void* bias;          ///< [experts, dim]
  const std::int32_t* ends;  ///< [num_groups]; see Groups
  int num_groups;
  int per_expert;
  void* rows;                      ///< [num_rows, dim]
  const float* factors = nullptr;  ///< [num_rows], or null: 1
  float* dots = nullptr;           ///< [num_rows]
  std::int64_t num_rows;
  std::int64_t dim;
  Dtype dtype;
};

/// Copies narrow rows; see flatshard/exchange/narrow_rows.h. The rows of rank
/// `run % num_ranks` are in its window, one run after the other.
struct CopyNarrowRows {
  const std::int64_t* windows;  ///< [num_ranks] addresses
  /// [2, num_runs + 1]: of each run its first row here, and its first row in
  /// its window. [0, num_runs] is num_rows.
  const std::int32_t* runs;
  std::uint32_t* here;
  std::int64_t in_window;  ///< bytes in front of the first row there
  std::int64_t num_rows;   ///< here
  int num_ranks;
  int num_runs;
  int words;     ///< 4-byte words per row
  bool gathers;  ///< from the windows to `here`; false: the other way
};

using MoeKernel = std::variant<
    RouterForward,
    RouterBackward,
    CountExperts,
    SortByExpert,
    PlaceRows,
    PermuteRows,
    SumRows,
    WeightedGate,
    ExpertBiases,
    CopyNarrowRows>;

// Queue on `stream` and return. The caller checks cudaGetLastError.
void launch(const RouterForward& args, CUstream_st* stream);
void launch(const RouterBackward& args, CUstream_st* stream);
void launch(const CountExperts& args, CUstream_st* stream);
void launch(const SortByExpert& args, CUstream_st* stream);
void launch(const PlaceRows& args, CUstream_st* stream);
void launch(const PermuteRows& args, CUstream_st* stream);
void launch(const SumRows& args, CUstream_st* stream);
void launch(const WeightedGate& args, CUstream_st* stream);
void launch(const ExpertBiases& args, CUstream_st* stream);
void launch(const CopyNarrowRows& args, CUstream_st* stream);

}  // namespace flatshard::nn::kernels
