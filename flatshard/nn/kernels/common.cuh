#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "flatshard/nn/kernels/kernels.h"

namespace flatshard::nn::kernels {

__device__ inline float to_float(float v) {
  return v;
}
__device__ inline float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <class T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

/// N elements moved by one load or store (16 bytes where T and N make it so).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T, int N>
__device__ inline void load(const T* from, float (&to)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to[i] = to_float(pack.v[i]);
  }
}

template <class T, int N>
__device__ inline void store(T* to, const float (&from)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    pack.v[i] = from_float<T>(from[i]);
  }
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// As many elements as fit 16 bytes.
template <class T>
constexpr int kWide = 16 / sizeof(T);

inline bool aligned16(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(0xffffffffU, v, offset);
  }
  return v;
}

/// Sum over the block, given to every thread. `scratch` holds 33 floats and
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

inline int divide_up(std::int64_t a, std::int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

}  // namespace flatshard::nn::kernels
