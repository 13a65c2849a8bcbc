#include <algorithm>

#include "flatshard/moe/kernels/moe.h"
#include "flatshard/nn/kernels/common.cuh"
#include "flatshard/nn/kernels/swiglu.cuh"

namespace flatshard::nn::kernels {
namespace {

constexpr int kRowThreads = 256;
// The result is read once, much later, so it should not drive x out of the
// cache.
template <class T, int N>
__device__ inline void store_past_cache(Pack<T, N>* to, const Pack<T, N>& v) {
  if constexpr (sizeof(Pack<T, N>) == sizeof(int4)) {
    __stcs(reinterpret_cast<int4*>(to), reinterpret_cast<const int4&>(v));
  } else {
    *to = v;
  }
}

// A block has several rows, so that each thread has several loads under way.
constexpr int kRowsOfBlock = 4;

__global__ void row_places_kernel(PlaceRows args) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.rows) {
    return;
  }
  int place = static_cast<int>(row);
  if (row >= args.num_rows) {
    place = -1;
  } else {
    int low = 0;  // runs that begin at or before this row
    int high = args.num_runs + 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (args.runs[middle] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low > 0 && low <= args.num_runs) {
      const int run = low - 1;
      place =
          -2 - (args.runs[args.num_runs + 1 + run] + place - args.runs[run]);
    }
  }
  args.of_rows[row] = place;
  args.of_pairs[args.order[row]] = place;
}

// A row by its place, where all rows are in `leaving` without Split.
template <bool Split, class T>
__device__ inline T*
row_at(T* leaving, T* staying, std::int64_t place, std::int64_t length) {
  if constexpr (Split) {
    if (place < 0) {
      return staying + (-2 - place) * length;
    }
  }
  return leaving + place * length;
}

template <class T, int N, bool Split>
__global__ void permute_rows_kernel(PermuteRows args, int packs) {
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kRowsOfBlock;
  const int n =
      static_cast<int>(min(args.rows - first, std::int64_t{kRowsOfBlock}));
  const Pack<T, N>* from[kRowsOfBlock];
  Pack<T, N>* to[kRowsOfBlock];
#pragma unroll
  for (int r = 0; r < kRowsOfBlock; ++r) {
    const std::int64_t row = first + (r < n ? r : 0);
    const std::int64_t token =
        args.order[row] / static_cast<int>(args.per_token);
    from[r] = static_cast<const Pack<T, N>*>(args.x) + token * packs;
    to[r] = row_at<Split>(
        static_cast<Pack<T, N>*>(args.out),
        static_cast<Pack<T, N>*>(args.staying),
        Split ? args.places[row] : row,
        packs);
  }
  for (int at = threadIdx.x; at < packs; at += blockDim.x) {
    Pack<T, N> v[kRowsOfBlock];
#pragma unroll
    for (int r = 0; r < kRowsOfBlock; ++r) {
      if (r < n) {
        v[r] = from[r][at];
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsOfBlock; ++r) {
      if (r < n) {
        store_past_cache<T, N>(to[r] + at, v[r]);
      }
    }
  }
}

template <class T, int N>
__device__ inline void add_pack(const T* from, float (&sum)[N]) {
  float v[N];
  load<T, N>(from, v);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] += v[i];
  }
}

// Without Split only -1 is negative.
template <class T, int N, bool Split>
__global__ void sum_rows_kernel(SumRows args, std::int64_t packs) {
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.tokens * packs) {
    return;
  }
  const std::int64_t token = i / packs;
  const std::int64_t column = i % packs * N;
  const std::int64_t mine = token * args.dim + column;
  float sum[N] = {};
  if (args.addend != nullptr) {
    add_pack<T, N>(static_cast<const T*>(args.addend) + mine, sum);
  }
  constexpr int kAtOnce = 4;  // loads under way; the sum keeps its order
  const T* rows = static_cast<const T*>(args.rows) + column;
  const T* staying = static_cast<const T*>(args.staying) + column;
  for (std::int64_t j = 0; j < args.slots; j += kAtOnce) {
    std::int64_t place[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      place[k] =
          j + k < args.slots ? args.places[token * args.slots + j + k] : -1;
    }
    float v[kAtOnce][N];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (place[k] != -1) {
        load<T, N>(row_at<Split>(rows, staying, place[k], args.dim), v[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int i = 0; i < N && place[k] != -1; ++i) {
        sum[i] += v[k][i];
      }
    }
  }
  store<T, N>(static_cast<T*>(args.out) + mine, sum);
}

template <class T, int N>
__global__ void weighted_forward_kernel(WeightedSwiglu args) {
  const std::int64_t packs = args.dim / N;
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * packs) {
    return;
  }
  const std::int64_t row = i / packs;
  const std::int64_t column = i % packs * N;
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.dim;
  const float weight = args.weights[row];
  float g[N];
  float u[N];
  load<T, N>(gate + column, g);
  load<T, N>(gate + args.dim + column, u);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    g[j] = swiglu(g[j], sigmoid(g[j]), u[j]) * weight;
  }
  store<T, N>(static_cast<T*>(args.y) + row * args.dim + column, g);
}

// One block for each row, since the weight's gradient is a sum over it.
template <class T, int N>
__global__ void weighted_backward_kernel(WeightedSwiglu args) {
  __shared__ float scratch[33];
  const std::int64_t row = blockIdx.x;
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.dim;
  T* dgate = static_cast<T*>(args.dgate_up) + row * 2 * args.dim;
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
    load<T, N>(gate + at, g);
    load<T, N>(gate + args.dim + at, u);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float s = sigmoid(g[j]);
      const float p = swiglu(g[j], s, u[j]);
      sum += d[j] * p;
      product[j] = p * weight;
      const SwigluGradient gradient =
          swiglu_gradient(d[j] * weight, g[j], s, u[j]);
      g[j] = gradient.gate;
      u[j] = gradient.up;
    }
    store<T, N>(y + at, product);  // may be dy, which was read above
    store<T, N>(dgate + at, g);
    store<T, N>(dgate + args.dim + at, u);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) {
    args.dweights[row] = sum;
  }
}

// Calls run<T, N> with as many elements at a time as all pointers allow.
template <class Run>
void with_pack(Dtype dtype, std::int64_t dim, bool aligned, Run&& run) {
  const auto with = [&]<class T>(T) {
    if (aligned && dim % kWide<T> == 0) {
      run.template operator()<T, kWide<T>>();
    } else {
      run.template operator()<T, 1>();
    }
  };
  dtype == Dtype::f32 ? with(float{}) : with(__nv_bfloat16{});
}

}  // namespace

void row_places(const PlaceRows& args, cudaStream_t stream) {
  if (args.rows > 0) {
    row_places_kernel<<<
        divide_up(args.rows, kRowThreads),
        kRowThreads,
        0,
        stream>>>(args);
  }
}

void permute_rows(const PermuteRows& args, cudaStream_t stream) {
  if (args.rows == 0 || args.dim == 0) {
    return;
  }
  const bool aligned =
      aligned16(args.x) && aligned16(args.out) && aligned16(args.staying);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    const int packs = static_cast<int>(args.dim / N);
    const int threads = std::min(divide_up(packs, 32) * 32, kRowThreads);
    const auto run = [&](auto kernel) {
      kernel<<<divide_up(args.rows, kRowsOfBlock), threads, 0, stream>>>(
          args,
          packs);
    };
    args.places != nullptr ? run(permute_rows_kernel<T, N, true>)
                           : run(permute_rows_kernel<T, N, false>);
  });
}

void sum_rows(const SumRows& args, cudaStream_t stream) {
  if (args.tokens == 0 || args.dim == 0) {
    return;
  }
  const bool aligned = aligned16(args.rows) && aligned16(args.staying) &&
                       aligned16(args.addend) && aligned16(args.out);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    const std::int64_t packs = args.dim / N;
    const auto run = [&](auto kernel) {
      kernel<<<
          divide_up(args.tokens * packs, kRowThreads),
          kRowThreads,
          0,
          stream>>>(args, packs);
    };
    args.staying != nullptr ? run(sum_rows_kernel<T, N, true>)
                            : run(sum_rows_kernel<T, N, false>);
  });
}

void weighted_swiglu_forward(const WeightedSwiglu& args, cudaStream_t stream) {
  if (args.rows == 0 || args.dim == 0) {
    return;
  }
  const bool aligned = aligned16(args.gate_up) && aligned16(args.y);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    weighted_forward_kernel<T, N>
        <<<divide_up(args.rows * (args.dim / N), kRowThreads),
           kRowThreads,
           0,
           stream>>>(args);
  });
}

void weighted_swiglu_backward(const WeightedSwiglu& args, cudaStream_t stream) {
  if (args.rows == 0) {
    return;
  }
  const bool aligned = aligned16(args.dy) && aligned16(args.gate_up) &&
                       aligned16(args.y) && aligned16(args.dgate_up);
  with_pack(args.dtype, args.dim, aligned, [&]<class T, int N>() {
    const std::int64_t packs = (args.dim + N - 1) / N;
    const int wanted = static_cast<int>((packs + 31) / 32 * 32);
    const int threads = std::clamp(wanted, 32, kRowThreads);
    const auto blocks = static_cast<unsigned>(args.rows);
    weighted_backward_kernel<T, N><<<blocks, threads, 0, stream>>>(args);
  });
}

}  // namespace flatshard::nn::kernels
