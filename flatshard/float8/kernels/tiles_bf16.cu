#include "flatshard/float8/kernels/tiles_of.cuh"

namespace flatshard::float8::kernels {

template void
quantize_tiles_of<__nv_bfloat16>(const Values&, const Quantize&, cudaStream_t);
template void row_and_column_amax_of<__nv_bfloat16>(
    const Values&,
    float*,
    float*,
    cudaStream_t);

}  // namespace flatshard::float8::kernels
