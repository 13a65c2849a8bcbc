#include "flatshard/comm/sum_rows_kernel.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/pack.cuh"
#include "flatshard/device/with_float_dtype.cuh"

namespace flatshard::kernels {
namespace {

// Enough to reach the memory's speed, and few enough to leave most of the GPU
// to kernels that run in parallel.
constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 264;

unsigned blocks_for(std::int64_t items) {
  const std::int64_t wanted = ceil_div(items, kThreads);
  return static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
}

template <class T, int N>
__device__ inline void sum_pack(
    const T* rows,
    std::int64_t stride,
    int num_rows,
    int rank,
    const T* own,
    T* out,
    float scale,
    std::int64_t at) {
  float sum[N] = {};
#pragma unroll 8
  for (int r = 0; r < num_rows; ++r) {
    float row[N];
    load<T, N>((r == rank ? own : rows + r * stride) + at, row);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum[i] += row[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] *= scale;
  }
  store<T, N>(out + at, sum);
}

template <class T, int N>
__global__ void sum_rows_kernel(
    const T* __restrict__ rows,
    std::int64_t stride,
    int num_rows,
    int rank,
    const T* __restrict__ own,
    T* __restrict__ out,
    std::int64_t numel,
    float scale) {
  const std::int64_t thread =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t threads =
      static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t packs = numel / N;
  for (std::int64_t p = thread; p < packs; p += threads) {
    sum_pack<T, N>(rows, stride, num_rows, rank, own, out, scale, p * N);
  }
  for (std::int64_t i = packs * N + thread; i < numel; i += threads) {
    sum_pack<T, 1>(rows, stride, num_rows, rank, own, out, scale, i);
  }
}

template <class T>
void launch(
    const void* rows,
    std::int64_t stride,
    int num_rows,
    int rank,
    const void* own,
    void* out,
    std::int64_t numel,
    float scale,
    cudaStream_t stream) {
  const bool wide = aligned16(rows) && aligned16(own) && aligned16(out) &&
                    stride % kWide<T> == 0;
  const auto kernel =
      wide ? sum_rows_kernel<T, kWide<T>> : sum_rows_kernel<T, 1>;
  kernel<<<
      blocks_for(wide ? numel / kWide<T> + 1 : numel),
      kThreads,
      0,
      stream>>>(
      static_cast<const T*>(rows),
      stride,
      num_rows,
      rank,
      static_cast<const T*>(own),
      static_cast<T*>(out),
      numel,
      scale);
}

// Loads N float32 values, 16 bytes at a time.
template <int N>
__device__ inline void load_all(const float* from, float (&to)[N]) {
  constexpr int kStep = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    load<float, kStep>(from + i, reinterpret_cast<float(&)[kStep]>(to[i]));
  }
}

template <int N>
__device__ inline void store_all(float* to, const float (&from)[N]) {
  constexpr int kStep = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kStep) {
    store<float, kStep>(
        to + i,
        reinterpret_cast<const float(&)[kStep]>(from[i]));
  }
}

template <class T, int N>
__device__ inline void
add_pack(float* into, const T* from, float scale, bool add, std::int64_t at) {
  float sum[N] = {};
  float value[N];
  load<T, N>(from + at, value);
  if (add) {
    load_all<N>(into + at, sum);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] += scale * value[i];
  }
  store_all<N>(into + at, sum);
}

template <class T, int N>
__global__ void add_scaled_kernel(
    float* __restrict__ into,
    const T* __restrict__ from,
    std::int64_t numel,
    float scale,
    bool add) {
  const std::int64_t thread =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t threads =
      static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t packs = numel / N;
  for (std::int64_t p = thread; p < packs; p += threads) {
    add_pack<T, N>(into, from, scale, add, p * N);
  }
  for (std::int64_t i = packs * N + thread; i < numel; i += threads) {
    add_pack<T, 1>(into, from, scale, add, i);
  }
}

template <class T>
void launch_add(
    float* into,
    const void* from,
    std::int64_t numel,
    float scale,
    bool add,
    cudaStream_t stream) {
  const bool wide = aligned16(into) && aligned16(from);
  const auto kernel =
      wide ? add_scaled_kernel<T, kWide<T>> : add_scaled_kernel<T, 1>;
  kernel<<<
      blocks_for(wide ? numel / kWide<T> + 1 : numel),
      kThreads,
      0,
      stream>>>(into, static_cast<const T*>(from), numel, scale, add);
}

}  // namespace

cudaError_t sum_rows(
    const void* rows,
    std::int64_t stride,
    int num_rows,
    int rank,
    const void* own,
    void* out,
    std::int64_t numel,
    float scale,
    FloatDtype dtype,
    cudaStream_t stream) {
  if (numel == 0) {
    return cudaSuccess;
  }
  with_dtype(dtype, [&]<class T>(T) {
    launch<T>(rows, stride, num_rows, rank, own, out, numel, scale, stream);
  });
  return cudaGetLastError();
}

cudaError_t add_scaled(
    float* into,
    const void* from,
    std::int64_t numel,
    float scale,
    bool add,
    FloatDtype dtype,
    cudaStream_t stream) {
  if (numel == 0) {
    return cudaSuccess;
  }
  with_dtype(dtype, [&]<class T>(T) {
    launch_add<T>(into, from, numel, scale, add, stream);
  });
  return cudaGetLastError();
}

}  // namespace flatshard::kernels
