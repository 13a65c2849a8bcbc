#include <cuda_bf16.h>

#include "flatshard/float8/kernels/tiles_of.h"

namespace flatshard::float8::kernels {

void quantize_tiles(const Values& x, const Quantize& a, cudaStream_t stream) {
  x.dtype == Dtype::f32 ? quantize_tiles_of<float>(x, a, stream)
                        : quantize_tiles_of<__nv_bfloat16>(x, a, stream);
}

void row_and_column_amax(
    const Values& x,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  x.dtype == Dtype::f32
      ? row_and_column_amax_of<float>(x, rows, columns, stream)
      : row_and_column_amax_of<__nv_bfloat16>(x, rows, columns, stream);
}

}  // namespace flatshard::float8::kernels
