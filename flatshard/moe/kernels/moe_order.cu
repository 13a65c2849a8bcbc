#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/ops/kernels/common.cuh"

// Orders pairs of tokens and experts.
namespace flatshard::nn::kernels {
namespace {

constexpr int kCountThreads = 256;
constexpr unsigned kWholeWarp = 0xffffffffU;

__global__ void count_experts_kernel(CountExperts args) {
  extern __shared__ std::int32_t found[];
  const int num_experts = static_cast<int>(args.num_experts);
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    found[e] = 0;
  }
  __syncthreads();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i =
           static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < args.pairs;
       i += stride) {
    const std::int32_t e = args.experts[i];
    if (e >= 0 && e < num_experts) {
      atomicAdd(found + e, 1);  // integers: any order gives the same
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    if (found[e] != 0) {
      atomicAdd(args.counts + e, found[e]);
    }
  }
}

// bases[block][e]: number of pairs of the block that are routed to e.
__global__ void sort_count_kernel(SortByExpert args) {
  extern __shared__ std::int32_t found[];
  const int n = static_cast<int>(args.num_experts) + 1;
  for (int e = threadIdx.x; e < n; e += blockDim.x) {
    found[e] = 0;
  }
  __syncthreads();
  const std::int64_t pair =
      static_cast<std::int64_t>(blockIdx.x) * kSortPairs + threadIdx.x;
  if (pair < args.pairs) {
    atomicAdd(found + args.experts[pair], 1);
  }
  __syncthreads();
  std::int32_t* row = args.bases + static_cast<std::int64_t>(blockIdx.x) * n;
  for (int e = threadIdx.x; e < n; e += blockDim.x) {
    row[e] = found[e];
  }
}

__device__ inline int warp_inclusive_sum(int v, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kWholeWarp, v, offset);
    v += lane >= offset ? other : 0;
  }
  return v;
}

// bases[block][e]: the row of the block's first pair of e. One warp for each e.
__global__ void sort_scan_kernel(SortByExpert args, int blocks) {
  const int e = blockIdx.x;
  const int lane = threadIdx.x;
  const int n = static_cast<int>(args.num_experts) + 1;
  int begin = 0;
  for (int i = lane; i < e; i += 32) {
    begin += args.counts[i];
  }
  begin = __reduce_add_sync(kWholeWarp, begin);
  for (int from = 0; from < blocks; from += 32) {
    const int block = from + lane;
    std::int32_t* at = args.bases + static_cast<std::int64_t>(block) * n + e;
    const int count = block < blocks ? *at : 0;
    const int sum = warp_inclusive_sum(count, lane);
    if (block < blocks) {
      *at = begin + sum - count;
    }
    begin += __shfl_sync(kWholeWarp, sum, 31);
  }
}

// A pair's row is its block's base, plus the pairs of the same expert in
// earlier warps of the block and in lower lanes.
__global__ void sort_place_kernel(SortByExpert args) {
  extern __shared__ std::int32_t found[];  // [warps][n]
  const int n = static_cast<int>(args.num_experts) + 1;
  const int warps = blockDim.x / 32;
  for (int i = threadIdx.x; i < warps * n; i += blockDim.x) {
    found[i] = 0;
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const std::int64_t pair =
      static_cast<std::int64_t>(blockIdx.x) * kSortPairs + threadIdx.x;
  const int e = pair < args.pairs ? args.experts[pair] : -1;
  const unsigned same = __match_any_sync(kWholeWarp, e);
  const int rank = __popc(same & ((1U << lane) - 1U));
  if (rank == 0 && e >= 0) {
    found[warp * n + e] = __popc(same);
  }
  __syncthreads();
  if (e < 0) {
    return;
  }
  int row = args.bases[static_cast<std::int64_t>(blockIdx.x) * n + e] + rank;
  for (int w = 0; w < warp; ++w) {
    row += found[w * n + e];
  }
  args.order[row] = static_cast<std::int32_t>(pair);
  args.inverse[pair] = e < args.num_experts ? row : -1;
}

}  // namespace

void launch(const CountExperts& args, cudaStream_t stream) {
  const std::size_t nbytes = args.num_experts * sizeof(std::int32_t);
  cudaMemsetAsync(args.counts, 0, nbytes, stream);
  if (args.pairs == 0) {
    return;
  }
  constexpr std::int64_t kEach = 4096;  // pairs of a block
  count_experts_kernel<<<
      divide_up(args.pairs, kEach),
      kCountThreads,
      nbytes,
      stream>>>(args);
}

void launch(const SortByExpert& args, cudaStream_t stream) {
  if (args.pairs == 0) {
    return;
  }
  const int blocks = divide_up(args.pairs, kSortPairs);
  const std::size_t row = (args.num_experts + 1) * sizeof(std::int32_t);
  sort_count_kernel<<<blocks, kSortPairs, row, stream>>>(args);
  const int experts = static_cast<int>(args.num_experts) + 1;
  sort_scan_kernel<<<experts, 32, 0, stream>>>(args, blocks);
  sort_place_kernel<<<blocks, kSortPairs, kSortPairs / 32 * row, stream>>>(
      args);
}

}  // namespace flatshard::nn::kernels
