#pragma once

#include "flatshard/float8/kernels/float8_kernels.h"

namespace flatshard::float8::kernels {

/// quantize_tiles of values of T. A file per T, because each compiles slowly.
template <class T>
void quantize_tiles_of(
    const Values& x,
    const Quantize& args,
    cudaStream_t stream);
template <class T>
void row_and_column_amax_of(
    const Values& x,
    float* rows,
    float* columns,
    cudaStream_t stream);

}  // namespace flatshard::float8::kernels
