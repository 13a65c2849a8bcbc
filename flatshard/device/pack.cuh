#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Loads, computations and stores of the kernels of all folders.
namespace flatshard::kernels {

__device__ inline float to_float(float v) {
  return v;
}
__device__ inline float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ inline float to_float(__half v) {
  return __half2float(v);
}

/// Rounds to nearest even.
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
template <>
__device__ inline __half from_float<__half>(float v) {
  return __float2half_rn(v);
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

/// The number of elements in 16 bytes.
template <class T>
constexpr int kWide = 16 / sizeof(T);

inline bool aligned16(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

}  // namespace flatshard::kernels
