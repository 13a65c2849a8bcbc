#include <algorithm>

#include "flatshard/float8/kernels/codec.cuh"

#include "flatshard/core/rounding.h"

namespace flatshard::float8::kernels {
namespace {

constexpr int kThreads = 256;

// ---------------------------------------------------------------- amax, flat

// Eight values at a time, four such loads in flight in each thread.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* x, std::int64_t numel, bool wide, float* amax) {
  __shared__ std::uint32_t scratch[32];
  constexpr int kUnroll = sizeof(T) == 2 ? 4 : 2;
  constexpr std::int64_t kStep = std::int64_t{kThreads} * 8;
  std::uint32_t found = 0;
  constexpr std::int64_t kChunk = kStep * kUnroll;
  // From the end: the next quantization of the tensor starts at its first
  // element and finds in the cache what was read last.
  for (std::int64_t chunk = (numel - 1) / kChunk - blockIdx.x; chunk >= 0;
       chunk -= gridDim.x) {
    const std::int64_t base = chunk * kChunk;
    Eight<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t at = base + u * kStep + threadIdx.x * 8;
      v[u] = load_eight<T>(x, at, numel - at, wide && at + 8 <= numel);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      found = larger(found, largest_of(v[u]));
    }
  }
  found = block_max(found, scratch);
  if (threadIdx.x == 0 && found != 0) {
    atomic_amax(amax, found);
  }
}

// Sixteen values to sixteen bytes.
template <class T, Format F>
__global__ void __launch_bounds__(kThreads) quantize_flat_kernel(
    const T* x,
    std::int64_t numel,
    bool wide,
    const PlanePointers p) {
  const float quantize = quantizer_of(float_of(magnitude(*p.amax)), F);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *static_cast<float*>(p.scales) = dequantizer_of(quantize);
  }
  const std::int64_t at =
      (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 16;
  if (at >= numel) {
    return;
  }
  const bool whole = wide && at + 16 <= numel;
  const Eight<T> a = load_eight<T>(x, at, numel - at, whole);
  const Eight<T> b = load_eight<T>(x, at + 8, numel - at - 8, whole);
  std::uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Eight<T>& v = i < 2 ? a : b;
    const int j = i % 2 * 4;
    codes[i] = encode4<F>(
        v[j] * quantize,
        v[j + 1] * quantize,
        v[j + 2] * quantize,
        v[j + 3] * quantize);
  }
  if (whole) {
    *reinterpret_cast<uint4*>(
        p.data + at) = {codes[0], codes[1], codes[2], codes[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (at + i < numel) {
      p.data[at + i] = static_cast<std::uint8_t>(codes[i / 4] >> (i % 4 * 8));
    }
  }
}

// ------------------------------------------------------------------- rowwise

// A block has a row, a thread up to P runs of eight in registers.
template <class T, Format F, int P>
__global__ void __launch_bounds__(1024) quantize_rows_kernel(
    const T* x,
    std::int64_t columns,
    bool wide,
    Rounding rounding,
    const PlanePointers p) {
  __shared__ std::uint32_t scratch[32];
  const std::int64_t row = blockIdx.x;
  x += row * columns;
  Eight<T> v[P];
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const std::int64_t c = (std::int64_t{i} * blockDim.x + threadIdx.x) * 8;
    v[i] = load_eight<T>(x, c, columns - c, wide);
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
    amax = larger(amax, largest_of(v[i]));
  }
  amax = block_max(amax, scratch);
  const float quantize = quantizer<Recipe::rowwise>(amax, F, rounding);
  if (threadIdx.x == 0) {
    static_cast<float*>(p.scales)[row * p.scale_row_stride] =
        dequantizer_of(quantize);
  }
  std::uint8_t* to = p.data + row * p.row_stride;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const std::int64_t c = (std::int64_t{i} * blockDim.x + threadIdx.x) * 8;
    if (c >= columns) {
      break;
    }
    float f[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      f[j] = v[i][j] * quantize;
    }
    const std::uint32_t low = encode4<F>(f[0], f[1], f[2], f[3]);
    const std::uint32_t high = encode4<F>(f[4], f[5], f[6], f[7]);
    if (wide) {
      *reinterpret_cast<uint2*>(to + c) = {low, high};
      continue;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (c + j < columns) {
        to[c + j] =
            static_cast<std::uint8_t>((j < 4 ? low : high) >> (j % 4 * 8));
      }
    }
  }
}

int num_multiprocessors() {
  static const int num = [] {
    int device = 0;
    int found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
    return std::max(found, 1);
  }();
  return num;
}

template <class Run>
void with_type(Dtype dtype, Run&& run) {
  dtype == Dtype::f32 ? run(float{}) : run(__nv_bfloat16{});
}

template <class Run>
void with_format(Format format, Run&& run) {
  format == Format::e4m3 ? run.template operator()<Format::e4m3>()
                         : run.template operator()<Format::e5m2>();
}

}  // namespace

void amax(const Values& x, float* to, cudaStream_t stream) {
  const std::int64_t numel = x.rows * x.columns;
  if (numel == 0) {
    return;
  }
  const std::int64_t blocks = std::min<std::int64_t>(
      ceil_div(numel, std::int64_t{kThreads} * 8),
      num_multiprocessors() * 8);
  with_type(x.dtype, [&]<class T>(T) {
    const T* data = static_cast<const T*>(x.data);
    amax_kernel<<<blocks, kThreads, 0, stream>>>(
        data,
        numel,
        aligned16(data),
        to);
  });
}

void quantize_flat(const Values& x, const Quantize& a, cudaStream_t stream) {
  const std::int64_t numel = x.rows * x.columns;
  const std::int64_t blocks =
      std::max<std::int64_t>(1, ceil_div(numel, kThreads * 16));
  with_type(x.dtype, [&]<class T>(T) {
    with_format(a.format, [&]<Format F>() {
      const T* data = static_cast<const T*>(x.data);
      quantize_flat_kernel<T, F><<<blocks, kThreads, 0, stream>>>(
          data,
          numel,
          aligned16(data) && aligned16(a.row.data),
          a.row);
    });
  });
}

void quantize_rows(const Values& x, const Quantize& a, cudaStream_t stream) {
  constexpr int kRuns = 4;
  const std::int64_t threads =
      ceil_div(ceil_div(x.columns, 8 * kRuns), 32) * 32;
  with_type(x.dtype, [&]<class T>(T) {
    with_format(a.format, [&]<Format F>() {
      const T* data = static_cast<const T*>(x.data);
      const bool wide =
          aligned16(data) && x.columns % 8 == 0 && aligned(a.row.data, 8);
      quantize_rows_kernel<T, F, kRuns>
          <<<static_cast<unsigned>(x.rows), threads, 0, stream>>>(
              data,
              x.columns,
              wide,
              a.rounding,
              a.row);
    });
  });
}

}  // namespace flatshard::float8::kernels
