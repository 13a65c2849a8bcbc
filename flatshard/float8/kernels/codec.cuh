#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "flatshard/core/rounding.h"
#include "flatshard/device/pack.cuh"
#include "flatshard/float8/formats.h"
#include "flatshard/float8/kernels/float8_kernels.h"

// Code that the kernels share: runs of eight values, their codes, largest
// magnitudes.
namespace flatshard::float8::kernels {

__host__ __device__ inline bool aligned(const void* p, unsigned nbytes) {
  return reinterpret_cast<std::uintptr_t>(p) % nbytes == 0;
}
__host__ __device__ inline bool aligned16(const void* p) {
  return aligned(p, 16);
}

/// Eight adjacent values of a row, in memory order.
template <class T>
struct Eight;

template <>
struct alignas(16) Eight<__nv_bfloat16> {
  std::uint32_t w[4];

  __device__ float operator[](int i) const {
    return float_of(i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xffff0000U);
  }
  __device__ void set(const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      w[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
};

template <>
struct alignas(16) Eight<float> {
  float w[8];

  __device__ float operator[](int i) const { return w[i]; }
  __device__ void set(const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = v[i];
    }
  }
};

template <class T>
__device__ inline Eight<T> zeros() {
  Eight<T> v;
#pragma unroll
  for (auto& word : v.w) {
    word = 0;
  }
  return v;
}

/// Loads eight values at x + at; only `num` exist, the others are zeros.
/// @param wide  x + at is aligned to 16 bytes, and num is 8 or at most 0.
template <class T>
__device__ inline Eight<T>
load_eight(const T* x, std::int64_t at, std::int64_t num, bool wide) {
  if (num <= 0) {
    return zeros<T>();
  }
  if (wide) {
    return *reinterpret_cast<const Eight<T>*>(x + at);
  }
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = i < num ? flatshard::kernels::to_float(x[at + i]) : 0.0F;
  }
  Eight<T> result;
  result.set(v);
  return result;
}

/// Two codes, a's in the low byte.
template <Format F>
__device__ inline std::uint32_t encode2(float a, float b) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(
      make_float2(a, b),
      __NV_SATFINITE,
      F == Format::e4m3 ? __NV_E4M3 : __NV_E5M2);
#else
  return encode(a, F) | static_cast<std::uint32_t>(encode(b, F)) << 8;
#endif
}

template <Format F>
__device__ inline std::uint32_t encode4(float a, float b, float c, float d) {
  return encode2<F>(a, b) | encode2<F>(c, d) << 16;
}

/// Decodes two codes, a in the low byte; exact, for every code is a half.
template <Format F>
__device__ inline float2 decode2(std::uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
      static_cast<__nv_fp8x2_storage_t>(codes & 0xffffU),
      F == Format::e4m3 ? __NV_E4M3 : __NV_E5M2);
  return __half22float2(__half2(pair));
#else
  return {
      decode(static_cast<std::uint8_t>(codes), F),
      decode(static_cast<std::uint8_t>(codes >> 8), F)};
#endif
}

/// Bits of |v|: they order as magnitudes do, NaN last.
__device__ inline std::uint32_t magnitude(float v) {
  return bits_of(v) & 0x7fffffffU;
}

__device__ inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
  return a > b ? a : b;
}

/// Magnitudes of eight values; bfloat16's two at a time, as their bits are.
template <class T>
struct Peaks {
  static constexpr int kWords = sizeof(T) == 2 ? 4 : 8;
  std::uint32_t w[kWords];

  __device__ void merge(const std::uint32_t (&other)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      w[i] = larger_word(w[i], other[i]);
    }
  }
  /// Returns value i, as float32's bits.
  __device__ std::uint32_t operator[](int i) const {
    if constexpr (sizeof(T) == 2) {
      return i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xffff0000U;
    } else {
      return w[i];
    }
  }
  __device__ std::uint32_t largest() const {
    std::uint32_t found = w[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      found = larger_word(found, w[i]);
    }
    return sizeof(T) == 2 ? larger(found << 16, found & 0xffff0000U) : found;
  }
  __device__ static std::uint32_t larger_word(
      std::uint32_t a,
      std::uint32_t b) {
    if constexpr (sizeof(T) == 2) {
      return __vmaxu2(a, b);
    } else {
      return larger(a, b);
    }
  }
};

template <class T>
__device__ inline Peaks<T> peaks_of(const Eight<T>& v) {
  Peaks<T> found;
#pragma unroll
  for (int i = 0; i < Peaks<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 2) {
      found.w[i] = v.w[i] & 0x7fff7fffU;
    } else {
      found.w[i] = magnitude(v.w[i]);
    }
  }
  return found;
}

template <class T>
__device__ inline std::uint32_t largest_of(const Eight<T>& v) {
  return peaks_of(v).largest();
}

/// Over groups of `Lanes` adjacent lanes; every lane gets it.
template <int Lanes>
__device__ inline std::uint32_t lanes_max(std::uint32_t v) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    v = larger(v, __shfl_xor_sync(0xffffffffU, v, offset));
  }
  return v;
}

/// Over the block, returned to every thread; `scratch` has 32 elements.
__device__ inline std::uint32_t block_max(
    std::uint32_t v,
    std::uint32_t* scratch) {
  v = lanes_max<32>(v);
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = v;
  }
  __syncthreads();
  const int warps = static_cast<int>((blockDim.x + 31) / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lanes_max<32>(lane < warps ? scratch[lane] : 0);
}

/// Most callers find a larger value there, and need no atomic.
__device__ inline void atomic_amax(float* to, std::uint32_t magnitude_bits) {
  auto* bits = reinterpret_cast<unsigned*>(to);
  if (magnitude_bits > *static_cast<volatile unsigned*>(bits)) {
    atomicMax(bits, magnitude_bits);
  }
}

/// Returns the factor of values, by the recipe's rule. A power of two has an
/// exact inverse.
template <Recipe R>
__device__ inline float
quantizer(std::uint32_t amax, Format format, Rounding rounding) {
  return has_power_of_two_scales(R)
             ? scale_of_e8m0(e8m0_of(float_of(amax), format, rounding)).quantize
             : quantizer_of(float_of(amax), format);
}

}  // namespace flatshard::float8::kernels
