#include <cfloat>

#include "flatshard/ops/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

// A running log-sum-exp: sum = sum of exp(x - max).
struct Lse {
  float max;
  float sum;
};

__device__ inline Lse merge(Lse a, Lse b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

__device__ inline Lse warp_merge(Lse v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = merge(
        v,
        {__shfl_xor_sync(0xffffffffU, v.max, offset),
         __shfl_xor_sync(0xffffffffU, v.sum, offset)});
  }
  return v;
}

__device__ inline Lse block_merge(Lse v, Lse* scratch) {
  v = warp_merge(v);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    scratch[warp] = v;
  }
  __syncthreads();
  const int warps = blockDim.x / 32;
  return warp_merge(lane < warps ? scratch[lane] : Lse{-FLT_MAX, 0.0F});
}

// One block per row: log-sum-exp in one pass, gradient in a second one that
// finds the row in L2.
template <class T, int N>
__global__ void __launch_bounds__(1024)
    cross_entropy_kernel(const CrossEntropy a) {
  __shared__ Lse scratch[32];
  const std::int64_t row = blockIdx.x;
  T* logits = static_cast<T*>(a.logits) + row * a.vocab;
  const std::int64_t target = a.targets[row];
  const bool ignored = target == a.ignore_index;
  const bool known = target >= 0 && target < a.vocab;
  const std::int64_t stride = static_cast<std::int64_t>(blockDim.x) * N;
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * N;
  if (ignored) {
    if (threadIdx.x == 0 && !a.lse_is_given) {
      a.loss[row] = 0.0F;
      a.lse[row] = 0.0F;
    }
    if (a.write_gradient) {
      const float zeros[N] = {};
      for (std::int64_t at = first; at < a.vocab; at += stride) {
        store<T, N>(logits + at, zeros);
      }
    }
    return;
  }
  float lse;
  if (a.lse_is_given) {
    lse = a.lse[row];
  } else {
    // Read before the barrier: afterwards others overwrite the row.
    const float unknown = a.is_part ? 0.0F : __int_as_float(0x7fc00000);  // NaN
    const float at_target =
        threadIdx.x == 0 && known ? to_float(logits[target]) : unknown;
    Lse running{-FLT_MAX, 0.0F};
    for (std::int64_t at = first; at < a.vocab; at += stride) {
      float v[N];
      load<T, N>(logits + at, v);
      float max = running.max;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        max = fmaxf(max, v[i]);
      }
      float sum = running.sum * __expf(running.max - max);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum += __expf(v[i] - max);
      }
      running = {max, sum};
    }
    const Lse total = block_merge(running, scratch);
    lse = total.max + logf(total.sum);
    if (threadIdx.x == 0) {
      a.loss[row] = a.is_part ? at_target : lse - at_target;
      a.lse[row] = lse;
    }
  }
  if (!a.write_gradient) {
    return;
  }
  const float scale = *a.scale;
  // The thread of the target's pack corrects it at the end, so that the loop
  // compares nothing.
  const bool has_target = known && target / N % blockDim.x == threadIdx.x;
  const float at_target = has_target ? to_float(logits[target]) : 0.0F;
  for (std::int64_t at = first; at < a.vocab; at += stride) {
    float v[N];
    load<T, N>(logits + at, v);
#pragma unroll
    for (float& x : v) {
      x = __expf(x - lse) * scale;
    }
    store<T, N>(logits + at, v);
  }
  if (has_target) {
    logits[target] = from_float<T>((__expf(at_target - lse) - 1.0F) * scale);
  }
}

}  // namespace

void cross_entropy(const CrossEntropy& a, cudaStream_t stream) {
  if (a.rows == 0) {
    return;
  }
  with_pack(a.dtype, a.vocab, aligned16(a.logits), [&]<class T, int N>() {
    const std::int64_t packs = a.vocab / N;
    const int threads = packs >= 1024 ? 1024 : divide_up(packs, 32) * 32;
    cross_entropy_kernel<T, N><<<a.rows, threads, 0, stream>>>(a);
  });
}

}  // namespace flatshard::nn::kernels
