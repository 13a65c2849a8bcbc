#pragma once

#include <cstdint>

#include "flatshard/core/rounding.h"
#include "flatshard/device/pack.cuh"
#include "flatshard/ops/kernels/ops_kernels.h"

namespace flatshard::nn::kernels {

using flatshard::kernels::aligned16;
using flatshard::kernels::from_float;
using flatshard::kernels::kWide;
using flatshard::kernels::load;
using flatshard::kernels::Pack;
using flatshard::kernels::store;
using flatshard::kernels::to_float;

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(0xffffffffU, v, offset);
  }
  return v;
}

/// Returns the sum over the block to every thread. `scratch` has 33 floats and
/// may be reused at once.
__device__ inline float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warps = (blockDim.x + 31) / 32;
  if (lane == 0) {
    scratch[warp] = v;
  }
  __syncthreads();
  if (warp == 0) {
    const float total = warp_sum(lane < warps ? scratch[lane] : 0.0F);
    if (lane == 0) {
      scratch[32] = total;
    }
  }
  __syncthreads();
  const float total = scratch[32];
  __syncthreads();
  return total;
}

/// Calls run<T> with the type of `dtype`.
template <class Run>
void with_type(Dtype dtype, const Run& run) {
  dtype == Dtype::f32 ? run.template operator()<float>()
                      : run.template operator()<__nv_bfloat16>();
}

/// Calls run<T, N>. N elements are 16 bytes if rows of `dim` elements are a
/// multiple of that, and all pointers are `aligned`; otherwise N is 1.
template <class Run>
void with_pack(Dtype dtype, std::int64_t dim, bool aligned, const Run& run) {
  with_type(dtype, [&]<class T>() {
    aligned&& dim % kWide<T> == 0 ? run.template operator()<T, kWide<T>>()
                                  : run.template operator()<T, 1>();
  });
}

inline int divide_up(std::int64_t a, std::int64_t b) {
  return static_cast<int>(ceil_div(a, b));
}

}  // namespace flatshard::nn::kernels
