#include "flatshard/device/philox_rounds.cuh"
#include "flatshard/ops/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

// A thread has four columns of a row, one block of Philox.
template <class T, int N>
__global__ void sample_dropout_kernel(SampleDropout args) {
  // Rows along x: a grid may have more of these than along y.
  const std::int64_t column =
      N * (static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  const std::int64_t row = blockIdx.x;
  if (column >= args.dim) {
    return;
  }
  const std::int64_t token = args.first_row + row;
  const std::int64_t sample = args.samples[token / args.seq_len];
  const std::int64_t block = (args.first_column + column) / 4;
  uint4 c{
      static_cast<std::uint32_t>(block),
      static_cast<std::uint32_t>(token % args.seq_len),
      static_cast<std::uint32_t>(sample),
      static_cast<std::uint32_t>(sample >> 32)};
  flatshard::kernels::philox(
      c,
      static_cast<std::uint32_t>(args.key),
      static_cast<std::uint32_t>(args.key >> 32));
  const std::uint32_t words[4] = {c.x, c.y, c.z, c.w};
  const std::int64_t at = row * args.dim + column;
  float x[N];
  load<T, N>(static_cast<const T*>(args.x) + at, x);
  float sum[N] = {};
  T* const out = static_cast<T*>(args.out) + at;
  if (args.adds) {
    load<T, N>(out, sum);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const std::uint32_t word = words[N == 4 ? i : column % 4];
    const bool stays = sample < 0 || word >= args.threshold;
    const float scale = sample < 0 ? 1.0F : args.scale;
    sum[i] += stays ? scale * x[i] : 0.0F;
  }
  store<T, N>(out, sum);
}

}  // namespace

void sample_dropout(const SampleDropout& args, cudaStream_t stream) {
  if (args.rows == 0 || args.dim == 0) {
    return;
  }
  constexpr int kThreads = 256;
  const bool wide =
      args.dim % 4 == 0 && aligned16(args.x) && aligned16(args.out);
  const int each = wide ? 4 : 1;
  with_type(args.dtype, [&]<class T>() {
    const dim3 grid(
        static_cast<unsigned>(args.rows),
        divide_up(divide_up(args.dim, each), kThreads));
    wide ? sample_dropout_kernel<T, 4><<<grid, kThreads, 0, stream>>>(args)
         : sample_dropout_kernel<T, 1><<<grid, kThreads, 0, stream>>>(args);
  });
}

}  // namespace flatshard::nn::kernels
