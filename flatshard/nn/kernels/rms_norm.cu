#include "flatshard/nn/kernels/amax.cuh"

namespace flatshard::nn::kernels {
namespace {

// A block handles one row at a time and a thread keeps its part of the row in
// registers: P packs of N elements, pack p at column (p * threads + tid) * N.
template <class T, class W, int N, int P, bool Amax>
__global__ void __launch_bounds__(1024)
    rms_norm_forward_kernel(const RmsNormForward a) {
  __shared__ float scratch[33];
  const std::int64_t base = blockIdx.x * a.dim;
  const T* x = static_cast<const T*>(a.x) + base;
  const T* delta = a.delta ? static_cast<const T*>(a.delta) + base : nullptr;
  T* sum = a.delta ? static_cast<T*>(a.sum) + base : nullptr;
  const W* weight = static_cast<const W*>(a.weight);
  T* y = a.y ? static_cast<T*>(a.y) + base : nullptr;
  float values[P][N];
  float squares = 0.0F;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column =
        (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
    if (column >= a.dim) {
      continue;
    }
    load<T, N>(x + column, values[p]);
    if (delta) {
      float other[N];
      load<T, N>(delta + column, other);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // Rounded as it is stored, so that backward sees the same input.
        values[p][i] = to_float(from_float<T>(values[p][i] + other[i]));
      }
      store<T, N>(sum + column, values[p]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      squares += values[p][i] * values[p][i];
    }
  }
  const float mean = block_sum(squares, scratch) / static_cast<float>(a.dim);
  const float rstd = 1.0F / sqrtf(mean + a.eps);
  if (threadIdx.x == 0) {
    a.rstd[blockIdx.x] = rstd;
  }
  if (!a.y && !Amax) {
    return;
  }
  std::uint32_t amax = 0;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column =
        (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
    if (column >= a.dim) {
      continue;
    }
    float w[N];
    load<W, N>(weight + column, w);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      w[i] *= values[p][i] * rstd;
    }
    if (y) {
      store<T, N>(y + column, w);
    }
    if constexpr (Amax) {
      amax = larger(amax, stored_amax<T>(w));
    }
  }
  if constexpr (Amax) {
    deliver_amax(amax, a.amax);
  }
}

template <class T, class W, int N, int P, bool Amax>
__global__ void __launch_bounds__(1024)
    rms_norm_backward_kernel(const RmsNormBackward a) {
  __shared__ float scratch[33];
  std::uint32_t amax = 0;
  float dw[P][N] = {};
  float weight[P][N];
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column =
        (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
    if (column < a.dim) {
      load<W, N>(static_cast<const W*>(a.weight) + column, weight[p]);
    }
  }
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const std::int64_t base = row * a.dim;
    const float rstd = a.rstd[row];
    float x[P][N];
    float g[P][N];  // dy, then dy * weight
    float dot = 0.0F;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const std::int64_t column =
          (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
      if (column >= a.dim) {
        continue;
      }
      load<T, N>(static_cast<const T*>(a.x) + base + column, x[p]);
      load<T, N>(static_cast<const T*>(a.dy) + base + column, g[p]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dw[p][i] += g[p][i] * x[p][i] * rstd;
        g[p][i] *= weight[p][i];
        dot += g[p][i] * x[p][i];
      }
    }
    const float pull = block_sum(dot, scratch) * rstd * rstd * rstd /
                       static_cast<float>(a.dim);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const std::int64_t column =
          (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
      if (column >= a.dim) {
        continue;
      }
      float dx[N] = {};
      if (a.dsum) {
        load<T, N>(static_cast<const T*>(a.dsum) + base + column, dx);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dx[i] += g[p][i] * rstd - x[p][i] * pull;
      }
      store<T, N>(static_cast<T*>(a.dx) + base + column, dx);
      if constexpr (Amax) {
        amax = larger(amax, stored_amax<T>(dx));
      }
      if (a.y) {
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          y[i] = weight[p][i] * (x[p][i] * rstd);  // the forward's bits
        }
        store<T, N>(static_cast<T*>(a.y) + base + column, y);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column =
        (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
    if (column < a.dim) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a.partial[blockIdx.x * a.dim + column + i] = dw[p][i];
      }
    }
  }
  if constexpr (Amax) {
    deliver_amax(amax, a.amax);
  }
}

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

// Picks N (wide or single loads) and P (packs a thread) for a row length.
template <class T, class W, class Run>
void choose(std::int64_t dim, bool wide, Run&& run) {
  constexpr int kN = kWide<T>;
  const std::int64_t n = wide && dim % kN == 0 ? kN : 1;
  const std::int64_t packs = dim / n;
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

template <class Run>
void choose_types(
    Dtype dtype,
    Dtype weight,
    std::int64_t dim,
    bool wide,
    Run&& run) {
  if (dtype == Dtype::f32) {
    choose<float, float>(dim, wide, run);
  } else if (weight == Dtype::f32) {
    choose<__nv_bfloat16, float>(dim, wide, run);
  } else {
    choose<__nv_bfloat16, __nv_bfloat16>(dim, wide, run);
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
      });
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
