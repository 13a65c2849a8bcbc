#include "flatshard/comm/sum_rows_kernel.h"
#include "flatshard/device/pack.cuh"

namespace flatshard::kernels {
namespace {

// Enough to reach the memory's speed, and few enough to leave most of the GPU
// to what computes beside it.
constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 264;

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
  const std::int64_t items = wide ? numel / kWide<T> + 1 : numel;
  const std::int64_t wanted = (items + kThreads - 1) / kThreads;
  const auto blocks =
      static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  const auto kernel =
      wide ? sum_rows_kernel<T, kWide<T>> : sum_rows_kernel<T, 1>;
  kernel<<<blocks, kThreads, 0, stream>>>(
      static_cast<const T*>(rows),
      stride,
      num_rows,
      rank,
      static_cast<const T*>(own),
      static_cast<T*>(out),
      numel,
      scale);
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
    RowDtype dtype,
    cudaStream_t stream) {
  if (numel == 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case RowDtype::float32:
      launch<
          float>(rows, stride, num_rows, rank, own, out, numel, scale, stream);
      break;
    case RowDtype::bfloat16:
      launch<__nv_bfloat16>(
          rows,
          stride,
          num_rows,
          rank,
          own,
          out,
          numel,
          scale,
          stream);
      break;
    case RowDtype::float16:
      launch<
          __half>(rows, stride, num_rows, rank, own, out, numel, scale, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace flatshard::kernels
