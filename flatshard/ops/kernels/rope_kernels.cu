#include "flatshard/ops/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

// One thread turns N pairs: N elements of each half of a head.
template <class T, int N>
__global__ void rope_kernel(const Rope a) {
  const std::int64_t half = a.head_dim / 2;
  const std::int64_t packs = half / N;
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= a.tokens * a.heads * packs) {
    return;
  }
  const std::int64_t row = index / packs;  // token and head
  const std::int64_t column = index % packs * N;
  const std::int64_t token = row / a.heads;
  const std::int64_t position =
      a.positions != nullptr ? a.positions[token] : token % a.seq_len;
  float c[N];
  float s[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    c[i] = a.cos[position * half + column + i];
    s[i] = a.sin[position * half + column + i];
    if (a.inverse) {
      s[i] = -s[i];
    }
  }
  const std::int64_t at = row * a.head_dim + column;
  float first[N];
  float second[N];
  load<T, N>(static_cast<const T*>(a.x) + at, first);
  load<T, N>(static_cast<const T*>(a.x) + at + half, second);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float u = first[i];
    const float v = second[i];
    first[i] = u * c[i] - v * s[i];
    second[i] = v * c[i] + u * s[i];
  }
  store<T, N>(static_cast<T*>(a.out) + at, first);
  store<T, N>(static_cast<T*>(a.out) + at + half, second);
}

}  // namespace

void rope(const Rope& a, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const std::int64_t half = a.head_dim / 2;
  const std::int64_t items = a.tokens * a.heads * half;
  if (items == 0) {
    return;
  }
  const bool aligned = aligned16(a.x) && aligned16(a.out);
  with_pack(a.dtype, half, aligned, [&]<class T, int N>() {
    rope_kernel<T, N>
        <<<divide_up(items / N, kThreads), kThreads, 0, stream>>>(a);
  });
}

}  // namespace flatshard::nn::kernels
