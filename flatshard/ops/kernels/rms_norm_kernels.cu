#include "flatshard/ops/kernels/rms_norm_kernels.cuh"

#include <algorithm>

namespace flatshard::nn::kernels {
namespace {

// 32 columns a block, 8 rows of threads; fixed order, so deterministic.
template <class G>
__global__ void rms_norm_partials_kernel(
    const float* partial,
    G* grad,
    std::int64_t blocks,
    std::int64_t dim,
    bool accumulate) {
  __shared__ float part[8][33];
  const std::int64_t column =
      static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float total = 0.0F;
  if (column < dim) {
    for (std::int64_t b = threadIdx.y; b < blocks; b += 8) {
      total += partial[b * dim + column];
    }
  }
  part[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y == 0 && column < dim) {
    for (int i = 1; i < 8; ++i) {
      total += part[i][threadIdx.x];
    }
    if (accumulate) {
      total += to_float(grad[column]);
    }
    grad[column] = from_float<G>(total);
  }
}

bool is_short(std::int64_t dim, int wide_pack) {
  return dim % wide_pack == 0 && dim / wide_pack <= 32;
}

// Picks N (wide or single loads) and P (packs a thread) for a row length; for
// short rows, a number of lanes.
template <class T, class W, class Run, class RunShort>
void choose(std::int64_t dim, bool wide, Run&& run, RunShort&& run_short) {
  constexpr int kN = kWide<T>;
  const std::int64_t n = wide && dim % kN == 0 ? kN : 1;
  const std::int64_t packs = dim / n;
  if (wide && is_short(dim, kN)) {
    if (packs <= 8) {
      run_short.template operator()<T, W, kN, 8>();
    } else if (packs <= 16) {
      run_short.template operator()<T, W, kN, 16>();
    } else {
      run_short.template operator()<T, W, kN, 32>();
    }
    return;
  }
  const auto threads_for = [&](std::int64_t per_thread) {
    return divide_up(divide_up(packs, per_thread), 32) * 32;
  };
  if (n == kN) {
    if (packs <= 1024) {
      run.template operator()<T, W, kN, 1>(threads_for(1));
    } else if (packs <= 2048) {
      run.template operator()<T, W, kN, 2>(threads_for(2));
    } else {
      run.template operator()<T, W, kN, 4>(threads_for(4));
    }
  } else if (packs <= 2048) {
    run.template operator()<T, W, 1, 2>(threads_for(2));
  } else {
    run.template operator()<T, W, 1, 16>(threads_for(16));
  }
}

template <class Run, class RunShort>
void choose_types(
    Dtype dtype,
    Dtype weight,
    std::int64_t dim,
    bool wide,
    Run&& run,
    RunShort&& run_short) {
  if (dtype == Dtype::f32) {
    choose<float, float>(dim, wide, run, run_short);
  } else if (weight == Dtype::f32) {
    choose<__nv_bfloat16, float>(dim, wide, run, run_short);
  } else {
    choose<__nv_bfloat16, __nv_bfloat16>(dim, wide, run, run_short);
  }
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a, cudaStream_t stream) {
  if (a.rows == 0) {
    return;
  }
  const bool wide = aligned16(a.x) && aligned16(a.delta) && aligned16(a.sum) &&
                    aligned16(a.y) && aligned16(a.weight);
  choose_types(
      a.dtype,
      a.weight_dtype,
      a.dim,
      wide,
      [&]<class T, class W, int N, int P>(int threads) {
        if (a.amax) {
          rms_norm_forward_kernel<T, W, N, P, true>
              <<<a.rows, threads, 0, stream>>>(a);
        } else {
          rms_norm_forward_kernel<T, W, N, P, false>
              <<<a.rows, threads, 0, stream>>>(a);
        }
      },
      [&]<class T, class W, int N, int Lanes>() {
        const int blocks = divide_up(a.rows, kShortThreads / Lanes);
        if (a.amax) {
          rms_norm_forward_short_kernel<T, W, N, Lanes, true>
              <<<blocks, kShortThreads, 0, stream>>>(a);
        } else {
          rms_norm_forward_short_kernel<T, W, N, Lanes, false>
              <<<blocks, kShortThreads, 0, stream>>>(a);
        }
      });
}

int rms_norm_backward_blocks_per_multiprocessor(Dtype dtype, std::int64_t dim) {
  const int wide_pack =
      dtype == Dtype::f32 ? kWide<float> : kWide<__nv_bfloat16>;
  if (is_short(dim, wide_pack)) {
    return 4;
  }
  // A multiprocessor has registers for this many. Fewer leave its memory idle.
  constexpr int kThreads = 1024;
  return std::clamp(kThreads / divide_up(dim, wide_pack), 2, 8);
}

void rms_norm_backward(const RmsNormBackward& a, cudaStream_t stream) {
  const bool wide = aligned16(a.x) && aligned16(a.dy) && aligned16(a.dsum) &&
                    aligned16(a.dx) && aligned16(a.y) && aligned16(a.weight);
  choose_types(
      a.dtype,
      a.weight_dtype,
      a.dim,
      wide,
      [&]<class T, class W, int N, int P>(int threads) {
        if (a.amax) {
          rms_norm_backward_kernel<T, W, N, P, true>
              <<<a.blocks, threads, 0, stream>>>(a);
        } else {
          rms_norm_backward_kernel<T, W, N, P, false>
              <<<a.blocks, threads, 0, stream>>>(a);
        }
      },
      [&]<class T, class W, int N, int Lanes>() {
        if (a.amax) {
          rms_norm_backward_short_kernel<T, W, N, Lanes, true>
              <<<a.blocks, kShortThreads, 0, stream>>>(a);
        } else {
          rms_norm_backward_short_kernel<T, W, N, Lanes, false>
              <<<a.blocks, kShortThreads, 0, stream>>>(a);
        }
      });
}

void sum_partials(
    const float* partial,
    void* grad,
    std::int64_t blocks,
    std::int64_t dim,
    bool accumulate,
    Dtype dtype,
    cudaStream_t stream) {
  const dim3 threads(32, 8);
  const int grid = divide_up(dim, 32);
  if (dtype == Dtype::f32) {
    rms_norm_partials_kernel<<<grid, threads, 0, stream>>>(
        partial,
        static_cast<float*>(grad),
        blocks,
        dim,
        accumulate);
  } else {
    rms_norm_partials_kernel<<<grid, threads, 0, stream>>>(
        partial,
        static_cast<__nv_bfloat16*>(grad),
        blocks,
        dim,
        accumulate);
  }
}

}  // namespace flatshard::nn::kernels
