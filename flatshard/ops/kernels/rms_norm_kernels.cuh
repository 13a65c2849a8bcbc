#pragma once

#include "flatshard/ops/kernels/amax.cuh"

// Kernels of RMSNorm and of its backward. Long rows have a block each, short
// ones a part of a warp; what happens to a pack of N elements is the same.
namespace flatshard::nn::kernels {
namespace {

// -- one pack, at `at` of the tensors and at `column` of its row --------------

// x into `x`, after x + delta where there is a delta. Returns the sum of
// squares.
template <class T, int N>
__device__ inline float
forward_input(const RmsNormForward& a, std::int64_t at, float (&x)[N]) {
  load<T, N>(static_cast<const T*>(a.x) + at, x);
  if (a.delta) {
    float delta[N];
    load<T, N>(static_cast<const T*>(a.delta) + at, delta);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Rounded as it is stored, so that backward reads the same input.
      x[i] = to_float(from_float<T>(x[i] + delta[i]));
    }
    store<T, N>(static_cast<T*>(a.sum) + at, x);
  }
  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    squares += x[i] * x[i];
  }
  return squares;
}

// Stores y. Returns its largest magnitude if Amax is set.
template <class T, class W, int N, bool Amax>
__device__ inline std::uint32_t forward_output(
    const RmsNormForward& a,
    std::int64_t at,
    std::int64_t column,
    const float (&x)[N],
    float rstd) {
  float y[N];
  load<W, N>(static_cast<const W*>(a.weight) + column, y);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    y[i] *= x[i] * rstd;
  }
  if (a.y) {
    store<T, N>(static_cast<T*>(a.y) + at, y);
  }
  return Amax ? stored_amax<T>(y) : 0;
}

// x into `x`, dy * weight into `g`; adds to dw. Returns the sum of g * x.
template <class T, int N>
__device__ inline float backward_input(
    const RmsNormBackward& a,
    std::int64_t at,
    const float (&weight)[N],
    float rstd,
    float (&x)[N],
    float (&g)[N],
    float (&dw)[N]) {
  load<T, N>(static_cast<const T*>(a.x) + at, x);
  load<T, N>(static_cast<const T*>(a.dy) + at, g);
  float dot = 0.0F;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dw[i] += g[i] * x[i] * rstd;
    g[i] *= weight[i];
    dot += g[i] * x[i];
  }
  return dot;
}

// Stores dx, and y if it is computed again. Returns dx's largest magnitude if
// Amax is set. `pull` is sum(g * x) * rstd^3 / dim.
template <class T, int N, bool Amax>
__device__ inline std::uint32_t backward_output(
    const RmsNormBackward& a,
    std::int64_t at,
    const float (&weight)[N],
    float rstd,
    float pull,
    const float (&x)[N],
    const float (&g)[N]) {
  float dx[N] = {};
  if (a.dsum) {
    load<T, N>(static_cast<const T*>(a.dsum) + at, dx);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dx[i] += g[i] * rstd - x[i] * pull;
  }
  store<T, N>(static_cast<T*>(a.dx) + at, dx);
  if (a.y) {
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      y[i] = weight[i] * (x[i] * rstd);  // the forward's bits
    }
    store<T, N>(static_cast<T*>(a.y) + at, y);
  }
  return Amax ? stored_amax<T>(dx) : 0;
}

// -- long rows ----------------------------------------------------------------

// A block handles one row at a time and a thread keeps its part of the row in
// registers: P packs, pack p at this column.
template <int N>
__device__ inline std::int64_t column_of(int p) {
  return (static_cast<std::int64_t>(p) * blockDim.x + threadIdx.x) * N;
}

template <class T, class W, int N, int P, bool Amax>
__global__ void __launch_bounds__(1024)
    rms_norm_forward_kernel(const RmsNormForward a) {
  __shared__ float scratch[33];
  const std::int64_t base = blockIdx.x * a.dim;
  float x[P][N];
  float squares = 0.0F;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column = column_of<N>(p);
    if (column < a.dim) {
      squares += forward_input<T>(a, base + column, x[p]);
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
    const std::int64_t column = column_of<N>(p);
    if (column < a.dim) {
      amax = larger(
          amax,
          forward_output<T, W, N, Amax>(a, base + column, column, x[p], rstd));
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
    const std::int64_t column = column_of<N>(p);
    if (column < a.dim) {
      load<W, N>(static_cast<const W*>(a.weight) + column, weight[p]);
    }
  }
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const std::int64_t base = row * a.dim;
    const float rstd = a.rstd[row];
    float x[P][N];
    float g[P][N];
    float dot = 0.0F;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const std::int64_t column = column_of<N>(p);
      if (column < a.dim) {
        dot += backward_input<T>(
            a,
            base + column,
            weight[p],
            rstd,
            x[p],
            g[p],
            dw[p]);
      }
    }
    const float pull = block_sum(dot, scratch) * rstd * rstd * rstd /
                       static_cast<float>(a.dim);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const std::int64_t column = column_of<N>(p);
      if (column < a.dim) {
        amax = larger(
            amax,
            backward_output<T, N, Amax>(
                a,
                base + column,
                weight[p],
                rstd,
                pull,
                x[p],
                g[p]));
      }
    }
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const std::int64_t column = column_of<N>(p);
    if (a.partial != nullptr && column < a.dim) {
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

// -- short rows ---------------------------------------------------------------

// Rows of few packs, such as the row of a head, are shared by the lanes of a
// part of a warp. With one block per row, a GPU waits for memory instead of
// using its bandwidth.
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
  float x[N];
  const float squares = here ? forward_input<T>(a, at, x) : 0.0F;
  const float mean = lanes_sum<Lanes>(squares) / static_cast<float>(a.dim);
  const float rstd = 1.0F / sqrtf(mean + a.eps);
  std::uint32_t amax = 0;
  if (here) {
    if (column == 0) {
      a.rstd[row] = rstd;
    }
    amax = forward_output<T, W, N, Amax>(a, at, column, x, rstd);
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
  float weight[N];
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
    float x[N];
    float g[N];
    const float dot =
        here ? backward_input<T>(a, at, weight, rstd, x, g, dw) : 0.0F;
    const float pull =
        lanes_sum<Lanes>(dot) * rstd * rstd * rstd / static_cast<float>(a.dim);
    if (here) {
      amax = larger(
          amax,
          backward_output<T, N, Amax>(a, at, weight, rstd, pull, x, g));
    }
  }
  if (a.partial != nullptr) {
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
  }
  if constexpr (Amax) {
    deliver_amax(amax, a.amax);
  }
}

}  // namespace
}  // namespace flatshard::nn::kernels
