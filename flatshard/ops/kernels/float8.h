#pragma once

#include <cstdint>

#include "flatshard/float8/kernels/float8_kernels.h"

/// Values that are quantized where they are computed and are never stored in
/// bfloat16. Each struct has the bfloat16 inputs in device memory and the
/// strides of their rows in elements. Row sizes are divisible by 8, and rows
/// start at multiples of 16 bytes.
namespace flatshard::nn::kernels {

/// silu(gate) * up [rows, columns]
struct SwigluValues {
  const void* gate;
  const void* up;
  std::int64_t gate_stride;
  std::int64_t up_stride;
  std::int64_t rows;
  std::int64_t columns;
};

/// The gradients of gate and up side by side [rows, columns = 2 * ffn].
struct SwigluGradientValues {
  const void* dy;
  const void* gate;
  const void* up;
  std::int64_t dy_stride;
  std::int64_t gate_stride;
  std::int64_t up_stride;
  std::int64_t rows;
  std::int64_t columns;
};

/// x * rstd * weight [rows, columns]; x is contiguous.
struct NormValues {
  const void* x;
  const float* rstd;
  const void* weight;
  bool float_weight;
  std::int64_t rows;
  std::int64_t columns;
};

/// Works as float8::kernels::quantize_tiles, to e4m3. SwiGLU gradients do not
/// support tensorwise recipes.
void quantize_values(
    const SwigluValues& values,
    const float8::kernels::Quantize& args,
    cudaStream_t stream);
void quantize_values(
    const SwigluGradientValues& values,
    const float8::kernels::Quantize& args,
    cudaStream_t stream);
void quantize_values(
    const NormValues& values,
    const float8::kernels::Quantize& args,
    cudaStream_t stream);

/// amax = max(amax, the largest magnitude).
void values_amax(const SwigluValues& values, float* amax, cudaStream_t stream);
void values_amax(
    const SwigluGradientValues& values,
    float* amax,
    cudaStream_t stream);
void values_amax(const NormValues& values, float* amax, cudaStream_t stream);

/// The same for each row and each column; either may be null.
void values_row_and_column_amax(
    const SwigluValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream);
void values_row_and_column_amax(
    const SwigluGradientValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream);
void values_row_and_column_amax(
    const NormValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream);

}  // namespace flatshard::nn::kernels
