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

// Rows of so few packs, such as a head's, are shared by the lanes of a part of
// a warp: with a block for each row a GPU waits for memory instead of filling
// it.
constexpr int kShortThreads = 256;

template <int Lanes>
__device__ inline float lanes_sum(float v) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    v += __shfl_xor_sync(0xffffffffU, v, offset);
  }
  return v;
}

template <class T, class W, int N, int Lanes, bool Amax>
__global__ void __launch_bounds__(kShortThreads)
    rms_norm_forward_short_kernel(const RmsNormForward a) {
  constexpr int kRows = kShortThreads / Lanes;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / Lanes;
  const int column = static_cast<int>(threadIdx.x) % Lanes * N;
  const bool here = row < a.rows && column < a.dim;
  const std::int64_t at = row * a.dim + column;
  float values[N] = {};
  float squares = 0.0F;
  if (here) {
    load<T, N>(static_cast<const T*>(a.x) + at, values);
    if (a.delta) {
      float other[N];
      load<T, N>(static_cast<const T*>(a.delta) + at, other);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = to_float(from_float<T>(values[i] + other[i]));
      }
      store<T, N>(static_cast<T*>(a.sum) + at, values);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      squares += values[i] * values[i];
    }
  }
  const float mean = lanes_sum<Lanes>(squares) / static_cast<float>(a.dim);
  const float rstd = 1.0F / sqrtf(mean + a.eps);
  std::uint32_t amax = 0;
  if (here) {
    if (column == 0) {
      a.rstd[row] = rstd;
    }
    float w[N];
    load<W, N>(static_cast<const W*>(a.weight) + column, w);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      w[i] *= values[i] * rstd;
    }
    if (a.y) {
      store<T, N>(static_cast<T*>(a.y) + at, w);
    }
    if constexpr (Amax) {
      amax = stored_amax<T>(w);
    }
  }
  if constexpr (Amax) {
    deliver_amax(amax, a.amax);
  }
}

template <class T, class W, int N, int Lanes, bool Amax>
__global__ void __launch_bounds__(kShortThreads)
    rms_norm_backward_short_kernel(const RmsNormBackward a) {
  constexpr int kRows = kShortThreads / Lanes;
  __shared__ float sums[kRows][Lanes * N];
  const int own = static_cast<int>(threadIdx.x) / Lanes;
  const int column = static_cast<int>(threadIdx.x) % Lanes * N;
  std::uint32_t amax = 0;
  float dw[N] = {};
  float weight[N] = {};
  if (column < a.dim) {
    load<W, N>(static_cast<const W*>(a.weight) + column, weight);
  }
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kRows;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows;
       first < a.rows;
       first += step) {
    const std::int64_t row = first + own;
    const bool here = row < a.rows && column < a.dim;
    const std::int64_t at = row * a.dim + column;
    const float rstd = row < a.rows ? a.rstd[row] : 0.0F;
    float x[N] = {};
    float g[N] = {};  // dy, then dy * weight
    float dot = 0.0F;
    if (here) {
      load<T, N>(static_cast<const T*>(a.x) + at, x);
      load<T, N>(static_cast<const T*>(a.dy) + at, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        dw[i] += g[i] * x[i] * rstd;
        g[i] *= weight[i];
        dot += g[i] * x[i];
      }
    }
    const float pull =
        lanes_sum<Lanes>(dot) * rstd * rstd * rstd / static_cast<float>(a.dim);
    if (!here) {
      continue;
    }
    float dx[N] = {};
    if (a.dsum) {
      load<T, N>(static_cast<const T*>(a.dsum) + at, dx);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dx[i] += g[i] * rstd - x[i] * pull;
    }
    store<T, N>(static_cast<T*>(a.dx) + at, dx);
    if constexpr (Amax) {
      amax = larger(amax, stored_amax<T>(dx));
    }
    if (a.y) {
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = weight[i] * (x[i] * rstd);  // the forward's bits
      }
      store<T, N>(static_cast<T*>(a.y) + at, y);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sums[own][column + i] = dw[i];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < a.dim; c += kShortThreads) {
    float total = 0.0F;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      total += sums[i][c];
    }
    a.partial[blockIdx.x * a.dim + c] = total;
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
  return is_short(dim, wide_pack) ? 4 : 2;
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
