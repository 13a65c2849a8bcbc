#include <algorithm>

#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/moe/kernels/row_threads.cuh"

namespace flatshard::nn::kernels {
namespace {

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
    int low = 0;  // number of runs that start at or before this row
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
__global__ void sum_token_rows_kernel(SumRows args, std::int64_t packs) {
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

}  // namespace

void launch(const PlaceRows& args, cudaStream_t stream) {
  if (args.rows > 0) {
    row_places_kernel<<<
        divide_up(args.rows, kRowThreads),
        kRowThreads,
        0,
        stream>>>(args);
  }
}

void launch(const PermuteRows& args, cudaStream_t stream) {
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

void launch(const SumRows& args, cudaStream_t stream) {
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
    args.staying != nullptr ? run(sum_token_rows_kernel<T, N, true>)
                            : run(sum_token_rows_kernel<T, N, false>);
  });
}

}  // namespace flatshard::nn::kernels
