#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/ops/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

constexpr int kNarrowThreads = 256;

__global__ void narrow_rows_kernel(CopyNarrowRows args) {
  const std::int64_t at =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t row = at / args.words;
  if (row >= args.num_rows) {
    return;
  }
  int low = 0;  // runs that start at or before this row; the first one does
  int high = args.num_runs;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.runs[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int run = low - 1;
  const std::int64_t at_home =
      args.runs[args.num_runs + 1 + run] + (row - args.runs[run]);
  auto* const window = reinterpret_cast<std::uint32_t*>(
      args.windows[run % args.num_ranks] + args.in_window);
  std::uint32_t* const there = window + at_home * args.words + at % args.words;
  if (args.gathers) {
    args.here[at] = *there;
  } else {
    *there = args.here[at];
  }
}

}  // namespace

void launch(const CopyNarrowRows& args, cudaStream_t stream) {
  const std::int64_t words = args.num_rows * args.words;
  if (words > 0) {
    narrow_rows_kernel<<<
        divide_up(words, kNarrowThreads),
        kNarrowThreads,
        0,
        stream>>>(args);
  }
}

}  // namespace flatshard::nn::kernels
