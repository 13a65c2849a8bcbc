#pragma once

#include <driver_types.h>

#include <cstdint>

/// Matmuls of grouped layers on sm_90a. `out` and `in` are multiples of
/// kProductTile, and
/// pointers are aligned to 16 bytes. Row r belongs to the first expert e with
/// r < ends[e]. Rows after the last end are neither read nor written.
namespace flatshard::nn::kernels {

constexpr int kProductTile = 256;

/// y[r] = x[r] W[e]^T, or x[r] W[e] with `is_in_out`.
struct GroupedRows {
  const void* x;             ///< bfloat16 [rows, in]
  const void* weight;        ///< bfloat16 [experts, out, in], or [.., in, out]
  const std::int32_t* ends;  ///< [experts]
  void* y;                   ///< bfloat16 [rows, out]
  std::int64_t rows;
  int experts;
  int out;
  int in;
  bool is_in_out;
};

/// The use of a weight gradient.
enum class WeightGradientUse { store_bfloat16, store_float32, add_float32 };

/// grad[e] = g_e^T x_e of the rows of each expert, or added to it.
struct GroupedWeightGradient {
  const void* g;             ///< bfloat16 [rows, out]
  const void* x;             ///< bfloat16 [rows, in]
  const std::int32_t* ends;  ///< [experts]
  void* grad;                ///< [experts, out, in]; without rows zeros
  std::int64_t rows;
  int experts;
  int out;
  int in;
  WeightGradientUse use;
};

/// Queues it on `stream`.
cudaError_t launch(const GroupedRows& args, cudaStream_t stream);
cudaError_t launch(const GroupedWeightGradient& args, cudaStream_t stream);

}  // namespace flatshard::nn::kernels
