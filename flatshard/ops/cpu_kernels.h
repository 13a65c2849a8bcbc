#pragma once

#include <cstdint>

// Plain loops over float32 rows for the CPU. Torch is not included here, so
// that only this file is compiled for several instruction sets.
namespace flatshard::nn::cpu {

/// y = x * rstd * w and rstd = 1 / sqrt(mean(x^2) + eps) for rows of dim.
void rms_norm_forward(
    const float* x,
    const float* w,
    float* y,
    float* rstd,
    std::int64_t rows,
    std::int64_t dim,
    float eps);

/// dx (overwritten; dsum, if not null, is added) and dw (added to).
void rms_norm_backward(
    const float* dy,
    const float* dsum,
    const float* x,
    const float* w,
    const float* rstd,
    float* dx,
    float* dw,
    std::int64_t rows,
    std::int64_t dim);

/// Rotates pairs (i, i + half) of rows [tokens, heads, 2 * half] by the angle
/// of their position; sign -1 undoes it. `in` may equal `out`.
/// @param positions  [tokens]; null: token % seq_len.
void rope(
    const float* in,
    float* out,
    const float* cos,
    const float* sin,
    std::int64_t tokens,
    std::int64_t seq_len,
    std::int64_t heads,
    std::int64_t half,
    float sign,
    const std::int32_t* positions = nullptr);

}  // namespace flatshard::nn::cpu
