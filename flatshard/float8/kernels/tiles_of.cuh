#pragma once

#include "flatshard/float8/kernels/tiles.cuh"
#include "flatshard/float8/kernels/tiles_of.h"

namespace flatshard::float8::kernels {

template <class T>
MemorySource<T> source_of(const Values& x) {
  const T* data = static_cast<const T*>(x.data);
  return {data, x.rows, x.columns, wide_rows(data, x.columns)};
}

template <class T>
void quantize_tiles_of(
    const Values& x,
    const Quantize& a,
    cudaStream_t stream) {
  const MemorySource<T> source = source_of<T>(x);
  a.format == Format::e4m3 ? quantize_source<Format::e4m3>(source, a, stream)
                           : quantize_source<Format::e5m2>(source, a, stream);
}

template <class T>
void row_and_column_amax_of(
    const Values& x,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  source_row_and_column_amax(source_of<T>(x), rows, columns, stream);
}

}  // namespace flatshard::float8::kernels
