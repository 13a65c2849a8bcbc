#include <algorithm>

#include "flatshard/core/rounding.h"
#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/moe/kernels/row_threads.cuh"
#include "flatshard/ops/clamped_silu.h"
#include "flatshard/ops/kernels/swiglu_kernels.cuh"

namespace flatshard::nn::kernels {
namespace {

struct SiluGate {
  static __device__ float product(float gate, float up) {
    return swiglu(gate, sigmoid(gate), up);
  }
  static __device__ SwigluGradient
  gradient(float dy, float gate, float up, float& product) {
    const float s = sigmoid(gate);
    product = swiglu(gate, s, up);
    return swiglu_gradient(dy, gate, s, up);
  }
};

// GateActivation::clamped_silu. Comparisons keep a NaN; fminf drops it.
struct ClampedGate {
  static constexpr auto kFactor = static_cast<float>(kClampedSiluFactor);
  static constexpr auto kLimit = static_cast<float>(kClampedSiluLimit);

  static __device__ float at_most(float v) { return v > kLimit ? kLimit : v; }
  static __device__ float factor_of(float up) {
    return (up < -kLimit ? -kLimit : at_most(up)) + 1.0F;
  }

  static __device__ float product(float gate, float up) {
    const float limited = at_most(gate);
    return swiglu(limited, sigmoid(kFactor * limited), factor_of(up));
  }
  static __device__ SwigluGradient
  gradient(float dy, float gate, float up, float& product) {
    const float limited = at_most(gate);
    const float s = sigmoid(kFactor * limited);
    const float factor = factor_of(up);
    product = swiglu(limited, s, factor);
    const float slope = s * __fmaf_rn(kFactor * limited, 1.0F - s, 1.0F);
    return {
        gate > kLimit ? 0.0F : dy * factor * slope,
        fabsf(up) > kLimit ? 0.0F : dy * limited * s};
  }
};

// Columns [column, column + N) of gate and of up, both from `row`.
template <bool InTurn, class T, int N>
__device__ inline void load_gate_up(
    const T* row,
    std::int64_t dim,
    std::int64_t column,
    float (&gate)[N],
    float (&up)[N]) {
  if constexpr (InTurn) {
    float low[N];
    float high[N];
    load<T, N>(row + 2 * column, low);
    load<T, N>(row + 2 * column + N, high);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int even = 2 * i;
      gate[i] = even < N ? low[even] : high[even - N];
      up[i] = even + 1 < N ? low[even + 1] : high[even + 1 - N];
    }
  } else {
    load<T, N>(row + column, gate);
    load<T, N>(row + dim + column, up);
  }
}

template <bool InTurn, class T, int N>
__device__ inline void store_gate_up(
    T* row,
    std::int64_t dim,
    std::int64_t column,
    const float (&gate)[N],
    const float (&up)[N]) {
  if constexpr (InTurn) {
    float low[N];
    float high[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int even = 2 * i;
      (even < N ? low[even % N] : high[even % N]) = gate[i];
      (even + 1 < N ? low[(even + 1) % N] : high[(even + 1) % N]) = up[i];
    }
    store<T, N>(row + 2 * column, low);
    store<T, N>(row + 2 * column + N, high);
  } else {
    store<T, N>(row + column, gate);
    store<T, N>(row + dim + column, up);
  }
}

template <class Activation, bool InTurn, class T, int N>
__global__ void gated_forward_kernel(WeightedGate args) {
  const std::int64_t packs = args.dim / N;
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * packs) {
    return;
  }
  const std::int64_t row = i / packs;
  const std::int64_t column = i % packs * N;
  const float weight = args.weights[row];
  float g[N];
  float u[N];
  load_gate_up<InTurn>(
      static_cast<const T*>(args.gate_up) + row * 2 * args.dim,
      args.dim,
      column,
      g,
      u);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    g[j] = Activation::product(g[j], u[j]) * weight;
  }
  store<T, N>(static_cast<T*>(args.y) + row * args.dim + column, g);
}

// One block for each row, since the weight's gradient is a sum over it.
template <class Activation, bool InTurn, class T, int N>
__global__ void gated_backward_kernel(WeightedGate args) {
  __shared__ float scratch[33];
  const std::int64_t row = blockIdx.x;
  const T* gate_up = static_cast<const T*>(args.gate_up) + row * 2 * args.dim;
  T* dgate_up = static_cast<T*>(args.dgate_up) + row * 2 * args.dim;
  const T* dy = static_cast<const T*>(args.dy) + row * args.dim;
  T* y = static_cast<T*>(args.y) + row * args.dim;
  const float weight = args.weights[row];
  float sum = 0.0F;
  for (std::int64_t at = threadIdx.x * N; at < args.dim;
       at += static_cast<std::int64_t>(blockDim.x) * N) {
    float d[N];
    float g[N];
    float u[N];
    float product[N];
    load<T, N>(dy + at, d);
    load_gate_up<InTurn>(gate_up, args.dim, at, g, u);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const SwigluGradient gradient =
          Activation::gradient(d[j] * weight, g[j], u[j], product[j]);
      sum += d[j] * product[j];
      product[j] *= weight;
      g[j] = gradient.gate;
      u[j] = gradient.up;
    }
    store<T, N>(y + at, product);  // y may alias dy, already read above
    store_gate_up<InTurn>(dgate_up, args.dim, at, g, u);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) {
    args.dweights[row] = sum;
  }
}

// Calls run<Activation, InTurn>.
template <class Run>
void with_gate(const Gate& gate, Run&& run) {
  const auto with = [&]<class Activation>(Activation) {
    gate.in_turn ? run.template operator()<Activation, true>()
                 : run.template operator()<Activation, false>();
  };
  gate.activation == GateActivation::clamped_silu ? with(ClampedGate{})
                                                  : with(SiluGate{});
}

// The bias of a row's expert; null for rows after the last end.
template <class T>
__device__ inline const T* bias_of(const ExpertBiases& args, std::int64_t row) {
  int low = 0;  // groups that end at or before this row
  int high = args.num_groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.ends[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low == args.num_groups ? nullptr
                                : static_cast<const T*>(args.bias) +
                                      low / args.per_expert * args.dim;
}

template <class T, int N>
__global__ void add_biases_kernel(ExpertBiases args) {
  const std::int64_t row = blockIdx.x;
  const T* bias = bias_of<T>(args, row);
  if (bias == nullptr) {
    return;
  }
  const float factor = args.factors == nullptr ? 1.0F : args.factors[row];
  T* rows = static_cast<T*>(args.rows) + row * args.dim;
  for (std::int64_t at = threadIdx.x * N; at < args.dim;
       at += static_cast<std::int64_t>(blockDim.x) * N) {
    float v[N];
    float b[N];
    load<T, N>(rows + at, v);
    load<T, N>(bias + at, b);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = __fmaf_rn(b[j], factor, v[j]);
    }
    store<T, N>(rows + at, v);
  }
}

template <class T, int N>
__global__ void add_bias_dots_kernel(ExpertBiases args) {
  __shared__ float scratch[33];
  const std::int64_t row = blockIdx.x;
  const T* bias = bias_of<T>(args, row);
  if (bias == nullptr) {
    return;  // uniform over the block
  }
  const T* rows = static_cast<const T*>(args.rows) + row * args.dim;
  float sum = 0.0F;
  for (std::int64_t at = threadIdx.x * N; at < args.dim;
       at += static_cast<std::int64_t>(blockDim.x) * N) {
    float v[N];
    float b[N];
    load<T, N>(rows + at, v);
    load<T, N>(bias + at, b);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum = __fmaf_rn(b[j], v[j], sum);
    }
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) {
    args.dots[row] += sum;
  }
}

// Threads of a block that has one row.
template <int N>
int threads_of_row(std::int64_t dim) {
  const std::int64_t packs = ceil_div(dim, N);
  return std::clamp(divide_up(packs, 32) * 32, 32, kRowThreads);
}

}  // namespace

void launch(const WeightedGate& args, cudaStream_t stream) {
  if (args.rows == 0 || (args.dim == 0 && args.dy == nullptr)) {
    return;
  }
  const bool aligned = aligned16(args.dy) && aligned16(args.gate_up) &&
                       aligned16(args.y) && aligned16(args.dgate_up);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    with_gate(args.gate, [&]<class Activation, bool InTurn>() {
      if (args.dy != nullptr) {
        gated_backward_kernel<Activation, InTurn, T, N>
            <<<static_cast<unsigned>(args.rows),
               threads_of_row<N>(args.dim),
               0,
               stream>>>(args);
      } else {
        gated_forward_kernel<Activation, InTurn, T, N>
            <<<divide_up(args.rows * (args.dim / N), kRowThreads),
               kRowThreads,
               0,
               stream>>>(args);
      }
    });
  });
}

void launch(const ExpertBiases& args, cudaStream_t stream) {
  if (args.num_rows == 0) {
    return;
  }
  const bool aligned = aligned16(args.rows) && aligned16(args.bias);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    const auto run = [&](auto kernel) {
      kernel<<<
          static_cast<unsigned>(args.num_rows),
          threads_of_row<N>(args.dim),
          0,
          stream>>>(args);
    };
    args.dots != nullptr ? run(add_bias_dots_kernel<T, N>)
                         : run(add_biases_kernel<T, N>);
  });
}

}  // namespace flatshard::nn::kernels
