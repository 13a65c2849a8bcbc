#pragma once

#include "flatshard/float8/kernels/codec.cuh"
#include "flatshard/ops/kernels/common.cuh"

// The largest magnitude of what a kernel stores, for the scale of a tensor.
namespace flatshard::nn::kernels {

using float8::kernels::larger;

/// Returns the amax of values as they are stored, as bits.
template <class T, int N>
__device__ inline std::uint32_t stored_amax(const float (&v)[N]) {
  std::uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    found = larger(
        found,
        float8::kernels::magnitude(to_float(from_float<T>(v[i]))));
  }
  return found;
}

/// amax = max(amax, results of the block's threads). All of them call it.
__device__ inline void deliver_amax(std::uint32_t found, float* amax) {
  __shared__ std::uint32_t scratch[32];
  found = float8::kernels::block_max(found, scratch);
  if (threadIdx.x == 0) {
    float8::kernels::atomic_amax(amax, found);
  }
}

/// The same for two: amax[0] and amax[1].
__device__ inline void deliver_amax(
    const std::uint32_t (&found)[2],
    float* amax) {
  deliver_amax(found[0], amax);
  __syncthreads();  // the scratch memory is one
  deliver_amax(found[1], amax + 1);
}

}  // namespace flatshard::nn::kernels
