#include "flatshard/core/rounding.h"
#include "flatshard/device/with_float_dtype.cuh"
#include "flatshard/float8/kernels/codec.cuh"
#include "flatshard/optim/flat_update.cuh"
#include "flatshard/optim/update_rules.h"

#include <algorithm>

namespace flatshard::kernels {
namespace {

using float_arithmetic::times;

// Returns the run that contains element i, or else an adjacent run.
__device__ const float8::FlatRun& run_at(
    const Float8Pointers& p,
    std::int64_t i) {
  int low = 0;
  int high = p.num_runs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.runs[middle].end <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return p.runs[low];
}

__device__ bool holds(const float8::FlatRun& run, std::int64_t i) {
  return i >= run.begin && i < run.end;
}

// Four new weights from element `at` on to the bytes and the scale of their 32;
// eight threads have those.
__device__ void
store_mxfp8(const Float8Pointers& p, std::int64_t at, float4 w) {
  using float8::kernels::magnitude;
  const float8::FlatRun& run = run_at(p, at);
  if (!holds(run, at)) {
    return;
  }
  unsigned amax =
      max(max(magnitude(w.x), magnitude(w.y)),
          max(magnitude(w.z), magnitude(w.w)));
  const unsigned mates = 0xffU << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    amax = max(amax, __shfl_xor_sync(mates, amax, offset));
  }
  constexpr auto kFormat = float8::Format::e4m3;
  const std::uint8_t code =
      float8::e8m0_of(float8::float_of(amax), kFormat, p.rounding);
  const std::int64_t in_run = at - run.begin;
  if (threadIdx.x % 8 == 0) {
    p.scales[run.scales + in_run / 32] = code;
  }
  const float q = float8::scale_of_e8m0(code).quantize;
  *reinterpret_cast<std::uint32_t*>(p.data + run.data + in_run) =
      float8::kernels::encode4<kFormat>(w.x * q, w.y * q, w.z * q, w.w * q);
}

// a / b of numbers >= 0, b > 0; weights of 2^32 elements are few.
__device__ std::int64_t divide(std::int64_t a, std::int64_t b) {
  return ((a | b) >> 32) != 0
             ? a / b
             : static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}

// Returns the index of the amax of the block that contains element i.
__device__ std::int64_t amax_of(const float8::FlatRun& run, std::int64_t i) {
  if (run.block_rows == 0) {
    return run.amax;
  }
  const std::int64_t at = run.first + i - run.begin;
  const std::int64_t row = divide(at, run.columns);
  const std::int64_t column = at - row * run.columns;
  return run.amax + divide(row, run.block_rows) * run.amax_stride +
         divide(column, run.block_columns);
}

// Largest magnitudes of blocks. Every thread of a block of threads calls it,
// those beyond the shard with zeros.
__device__ void find_amax(
    const Float8Pointers& p,
    std::int64_t numel,
    std::int64_t at,
    float4 w) {
  using float8::kernels::atomic_amax;
  using float8::kernels::lanes_max;
  using float8::kernels::magnitude;
  __shared__ std::uint32_t scratch[32];
  constexpr int kEach = kThreads * kVector;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kEach;
  const std::int64_t last = min(begin + kEach, numel) - 1;
  const float8::FlatRun& run = run_at(p, begin);
  const bool is_one_run = holds(run, begin) && holds(run, last);
  std::uint32_t found =
      max(max(magnitude(w.x), magnitude(w.y)),
          max(magnitude(w.z), magnitude(w.w)));
  // Consecutive elements of complete rows share an amax if the first and the
  // last element do.
  if (is_one_run && run.block_rows <= 1 &&
      amax_of(run, begin) == amax_of(run, last)) {
    found = float8::kernels::block_max(found, scratch);
    if (threadIdx.x == 0) {
      atomic_amax(p.amax + amax_of(run, begin), found);
    }
    return;
  }
  // A warp has 128 adjacent elements, mostly of one block.
  std::int64_t to = -1;
  if (at < numel) {
    const float8::FlatRun& own = is_one_run ? run : run_at(p, at);
    to = holds(own, at) ? amax_of(own, at) : -1;
  }
  constexpr unsigned kLanes = 0xffffffffU;
  if (__all_sync(kLanes, to == __shfl_sync(kLanes, to, 0))) {
    found = lanes_max<32>(found);
    if (threadIdx.x % 32 == 0 && to >= 0) {
      atomic_amax(p.amax + to, found);
    }
  } else if (to >= 0) {
    atomic_amax(p.amax + to, found);
  }
}

// Choices at compile time.
template <bool Float8, bool Ranges>
struct Parts {
  static constexpr bool kFloat8 = Float8;
  static constexpr bool kRanges = Ranges;
};

template <class Grad, class Compute, class Rule, class Parts>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const FlatUpdatePointers p) {
  const float scale = p.grad_scale == nullptr ? 1.0F : *p.grad_scale;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t e = i * kVector;
  float4 w = {0, 0, 0, 0};
  bool updates = i < p.numel / kVector;
  int group = 0;
  bool is_one_group = true;
  if constexpr (Parts::kRanges) {
    if (updates) {
      const UpdateRange range = p.ranges[range_of(p.ranges, p.num_ranges, e)];
      group = range.group;
      is_one_group = range.end >= e + kVector;
      updates = !is_one_group || group != UpdateRange::kSkipped;
    }
  }
  if (updates) {
    w = load4<float>(p.main, i);
    float4 g = load4<Grad>(p.grad, i);
    const float4 zero = {0, 0, 0, 0};
    float4 a = p.state0 == nullptr ? zero : load4<float>(p.state0, i);
    float4 b = p.state1 == nullptr ? zero : load4<float>(p.state1, i);
    g = {
        times(g.x, scale),
        times(g.y, scale),
        times(g.z, scale),
        times(g.w, scale)};
    if constexpr (!Parts::kRanges) {
      update4<Rule>(p.row, w, g, a, b);
    } else if (is_one_group) {
      const UpdateRow row = p.rows[group];
      update4<Rule>(row, w, g, a, b);
    } else {
      update_by_range<Rule>(p, e, w.x, g.x, a.x, b.x);
      update_by_range<Rule>(p, e + 1, w.y, g.y, a.y, b.y);
      update_by_range<Rule>(p, e + 2, w.z, g.z, a.z, b.z);
      update_by_range<Rule>(p, e + 3, w.w, g.w, a.w, b.w);
    }
    store4<float>(p.main, i, w);
    store4<Compute>(p.compute, i, w);
    if (p.state0 != nullptr) {
      store4<float>(p.state0, i, a);
    }
    if (p.state1 != nullptr) {
      store4<float>(p.state1, i, b);
    }
    if constexpr (Parts::kFloat8) {
      if (p.float8.data != nullptr) {
        store_mxfp8(p.float8, e, w);
      }
    }
  }
  if constexpr (Parts::kFloat8) {
    if (p.float8.amax != nullptr) {
      find_amax(p.float8, p.numel, e, w);
    }
  }
}

template <class Grad, class Compute, class Rule, class Parts>
void launch_parts(const FlatUpdatePointers& p, cudaStream_t stream) {
  const std::int64_t vectors = p.numel / kVector;
  // One vector a thread: blocks that follow each other keep more loads under
  // way than a loop does.
  const auto grid = static_cast<unsigned>(
      std::max<std::int64_t>(ceil_div(vectors, kThreads), 1));
  const auto kernel = update_kernel<Grad, Compute, Rule, Parts>;
  kernel<<<grid, kThreads, 0, stream>>>(p);
}

template <class Grad, class Compute, class Rule, bool Float8>
void launch_ranges(const FlatUpdatePointers& p, cudaStream_t stream) {
  if (p.num_ranges > 0) {
    launch_parts<Grad, Compute, Rule, Parts<Float8, true>>(p, stream);
  } else {
    launch_parts<Grad, Compute, Rule, Parts<Float8, false>>(p, stream);
  }
}

template <class Grad, class Compute, class Rule>
void launch(const FlatUpdatePointers& p, cudaStream_t stream) {
  if constexpr (Rule::kWritesFloat8) {
    if (p.float8.amax != nullptr || p.float8.data != nullptr) {
      launch_ranges<Grad, Compute, Rule, true>(p, stream);
      return;
    }
  }
  launch_ranges<Grad, Compute, Rule, false>(p, stream);
}

template <class Grad, class Rule>
void launch_compute(const FlatUpdatePointers& p, cudaStream_t stream) {
  if (p.compute == nullptr) {
    return launch<Grad, NoCompute, Rule>(p, stream);
  }
  with_dtype(p.compute_dtype, [&]<class Compute>(Compute) {
    launch<Grad, Compute, Rule>(p, stream);
  });
}

template <class Rule>
void dispatch(const FlatUpdatePointers& p, cudaStream_t stream) {
  with_dtype(p.grad_dtype, [&]<class Grad>(Grad) {
    launch_compute<Grad, Rule>(p, stream);
  });
}

}  // namespace

void flat_update(
    Algorithm algorithm,
    const FlatUpdatePointers& pointers,
    cudaStream_t stream) {
  with_update_rule(algorithm, [&]<class Rule>(Rule) {
    dispatch<Rule>(pointers, stream);
  });
}

}  // namespace flatshard::kernels
