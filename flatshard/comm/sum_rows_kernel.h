#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/device/float_dtype.h"

namespace flatshard::kernels {

/// out[i] = scale * (rows[0][i] + rows[1][i] + ...), added in float32 in this
/// order and rounded once.
///
/// @param rows  on the device, `num_rows` of them, `stride` elements apart.
/// @param own   what row `rank` is; not read from `rows`.
/// @param out   [numel] on the device, apart from the rows.
cudaError_t sum_rows(
    const void* rows,
    std::int64_t stride,
    int num_rows,
    int rank,
    const void* own,
    void* out,
    std::int64_t numel,
    float scale,
    FloatDtype dtype,
    cudaStream_t stream);

/// into[i] = scale * from[i], or into[i] + scale * from[i].
///
/// @param into, from  [numel] on the device
cudaError_t add_scaled(
    float* into,
    const void* from,
    std::int64_t numel,
    float scale,
    bool add,
    FloatDtype dtype,
    cudaStream_t stream);

}  // namespace flatshard::kernels
