#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flatshard/float8/kernels/codec.cuh"
#include "flatshard/optim/flat_update_kernels.h"

#include <algorithm>

namespace flatshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;

// Four values as float, whatever their dtype, with one load.
template <class T>
__device__ float4 load4(const void* from, std::int64_t i);
template <>
__device__ float4 load4<float>(const void* from, std::int64_t i) {
  return reinterpret_cast<const float4*>(from)[i];
}
template <>
__device__ float4 load4<__nv_bfloat16>(const void* from, std::int64_t i) {
  const uint2 raw = reinterpret_cast<const uint2*>(from)[i];
  const auto lo = *reinterpret_cast<const __nv_bfloat162*>(&raw.x);
  const auto hi = *reinterpret_cast<const __nv_bfloat162*>(&raw.y);
  const float2 a = __bfloat1622float2(lo);
  const float2 b = __bfloat1622float2(hi);
  return {a.x, a.y, b.x, b.y};
}
template <>
__device__ float4 load4<__half>(const void* from, std::int64_t i) {
  const uint2 raw = reinterpret_cast<const uint2*>(from)[i];
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return {a.x, a.y, b.x, b.y};
}

struct NoCompute {};

template <class T>
__device__ void store4(void* to, std::int64_t i, float4 v);
template <>
__device__ void store4<NoCompute>(void*, std::int64_t, float4) {
}
template <>
__device__ void store4<float>(void* to, std::int64_t i, float4 v) {
  reinterpret_cast<float4*>(to)[i] = v;
}
template <>
__device__ void store4<__nv_bfloat16>(void* to, std::int64_t i, float4 v) {
  const __nv_bfloat162 lo = __floats2bfloat162_rn(v.x, v.y);
  const __nv_bfloat162 hi = __floats2bfloat162_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = {
      *reinterpret_cast<const unsigned*>(&lo),
      *reinterpret_cast<const unsigned*>(&hi)};
}
template <>
__device__ void store4<__half>(void* to, std::int64_t i, float4 v) {
  const __half2 lo = __floats2half2_rn(v.x, v.y);
  const __half2 hi = __floats2half2_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = {
      *reinterpret_cast<const unsigned*>(&lo),
      *reinterpret_cast<const unsigned*>(&hi)};
}

// The run that element i is in: runs are few, so a search stays in cache.
__device__ int run_of(const std::int64_t* ends, int num_runs, std::int64_t i) {
  int low = 0;
  int high = num_runs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ float decay_of(const FlatUpdatePointers& p, std::int64_t i) {
  return p.num_ranges == 0 ? p.weight_decay
                           : p.decays[run_of(p.ends, p.num_ranges, i)];
}

// Four new weights from element `at` on to the bytes and the scale of their 32;
// eight threads have those.
__device__ void
store_mxfp8(const Float8Pointers& p, std::int64_t at, float4 w, unsigned amax) {
  const unsigned mates = 0xffU << (threadIdx.x % 32 / 8 * 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    amax = max(amax, __shfl_xor_sync(mates, amax, offset));
  }
  const std::uint8_t code =
      float8::e8m0_of(float8::float_of(amax), p.format, p.rounding);
  if (threadIdx.x % 8 == 0) {
    p.scales[at / 32] = code;
  }
  const float q = float8::scale_of_e8m0(code).quantize;
  using float8::Format;
  using float8::kernels::encode4;
  *reinterpret_cast<std::uint32_t*>(p.data + at) =
      p.format == Format::e4m3
          ? encode4<Format::e4m3>(w.x * q, w.y * q, w.z * q, w.w * q)
          : encode4<Format::e5m2>(w.x * q, w.y * q, w.z * q, w.w * q);
}

// Largest magnitudes of runs; every thread of the block calls it, those beyond
// the shard with zeros. Most blocks are in one run.
__device__ void find_amax(
    const Float8Pointers& p,
    std::int64_t numel,
    std::int64_t at,
    float4 w) {
  using float8::kernels::atomic_amax;
  using float8::kernels::magnitude;
  __shared__ std::uint32_t scratch[32];
  const std::int64_t begin = std::int64_t{blockIdx.x} * kThreads * kVector;
  const std::int64_t last = min(begin + kThreads * kVector, numel) - 1;
  const auto run = [&](std::int64_t i) {
    return p.num_runs > 1 ? run_of(p.ends, p.num_runs, i) : 0;
  };
  const float v[] = {w.x, w.y, w.z, w.w};
  const int first = run(begin);
  if (first == run(last)) {
    std::uint32_t found = 0;
    for (const float value : v) {
      found = max(found, magnitude(value));
    }
    found = float8::kernels::block_max(found, scratch);
    if (threadIdx.x == 0) {
      atomic_amax(p.amax + first, found);
    }
  } else if (at < numel) {
    for (int i = 0; i < kVector; ++i) {
      atomic_amax(p.amax + run(at + i), magnitude(v[i]));
    }
  }
}

struct AdamWRule {
  static constexpr bool kFloat8 = true;
  AdamWScalars s;
  float step_size;
  float inverse_c2;

  __device__ void operator()(float& w, float g, float& m, float& v, float decay)
      const {
    m = s.beta1 * m + (1.0F - s.beta1) * g;
    v = s.beta2 * v + (1.0F - s.beta2) * g * g;
    const float denominator = sqrtf(v) * inverse_c2 + s.eps;
    w = w * (1.0F - s.lr * decay) - step_size * m / denominator;
  }
};

struct SgdRule {
  static constexpr bool kFloat8 = false;
  SgdScalars s;

  __device__ void operator()(float& w, float g, float& u, float&, float decay)
      const {
    u = s.momentum * u + g;
    w = w * (1.0F - s.lr * decay) - s.lr * u;
  }
};

template <class Grad, class Compute, class Rule, bool Float8>
__global__ void __launch_bounds__(kThreads)
    update_kernel(FlatUpdatePointers p, Rule rule) {
  const float scale = p.grad_scale == nullptr ? 1.0F : *p.grad_scale;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float4 w = {0, 0, 0, 0};
  if (i < p.numel / kVector) {
    w = load4<float>(p.main, i);
    const float4 g = load4<Grad>(p.grad, i);
    const float4 zero = {0, 0, 0, 0};
    float4 a = p.state0 == nullptr ? zero : load4<float>(p.state0, i);
    float4 b = p.state1 == nullptr ? zero : load4<float>(p.state1, i);
    const std::int64_t e = i * kVector;
    rule(w.x, g.x * scale, a.x, b.x, decay_of(p, e));
    rule(w.y, g.y * scale, a.y, b.y, decay_of(p, e + 1));
    rule(w.z, g.z * scale, a.z, b.z, decay_of(p, e + 2));
    rule(w.w, g.w * scale, a.w, b.w, decay_of(p, e + 3));
    store4<float>(p.main, i, w);
    store4<Compute>(p.compute, i, w);
    if (p.state0 != nullptr) {
      store4<float>(p.state0, i, a);
    }
    if (p.state1 != nullptr) {
      store4<float>(p.state1, i, b);
    }
    if constexpr (Float8) {
      if (p.float8.data != nullptr) {
        using float8::kernels::magnitude;
        store_mxfp8(
            p.float8,
            e,
            w,
            max(max(magnitude(w.x), magnitude(w.y)),
                max(magnitude(w.z), magnitude(w.w))));
      }
    }
  }
  if constexpr (Float8) {
    if (p.float8.amax != nullptr) {
      find_amax(p.float8, p.numel, i * kVector, w);
    }
  }
}

template <class Grad, class Compute, class Rule>
void launch(const FlatUpdatePointers& p, Rule rule, cudaStream_t stream) {
  const std::int64_t vectors = p.numel / kVector;
  // One vector a thread: blocks that follow each other keep more loads under
  // way than a loop does.
  const auto grid = static_cast<unsigned>(
      std::max<std::int64_t>((vectors + kThreads - 1) / kThreads, 1));
  if constexpr (Rule::kFloat8) {
    if (p.float8.amax != nullptr || p.float8.data != nullptr) {
      const auto kernel = update_kernel<Grad, Compute, Rule, true>;
      kernel<<<grid, kThreads, 0, stream>>>(p, rule);
      return;
    }
  }
  const auto kernel = update_kernel<Grad, Compute, Rule, false>;
  kernel<<<grid, kThreads, 0, stream>>>(p, rule);
}

template <class Grad, class Rule>
void launch_compute(
    const FlatUpdatePointers& p,
    Rule rule,
    cudaStream_t stream) {
  switch (p.compute_dtype) {
    case Dtype::none:
      return launch<Grad, NoCompute>(p, rule, stream);
    case Dtype::float32:
      return launch<Grad, float>(p, rule, stream);
    case Dtype::bfloat16:
      return launch<Grad, __nv_bfloat16>(p, rule, stream);
    case Dtype::float16:
      return launch<Grad, __half>(p, rule, stream);
  }
}

template <class Rule>
void dispatch(const FlatUpdatePointers& p, Rule rule, cudaStream_t stream) {
  switch (p.grad_dtype) {
    case Dtype::bfloat16:
      return launch_compute<__nv_bfloat16>(p, rule, stream);
    case Dtype::float16:
      return launch_compute<__half>(p, rule, stream);
    default:
      return launch_compute<float>(p, rule, stream);
  }
}

}  // namespace

void adamw(
    const FlatUpdatePointers& pointers,
    AdamWScalars s,
    cudaStream_t stream) {
  const AdamWRule rule{
      s,
      s.lr / s.bias_correction1,
      1.0F / sqrtf(s.bias_correction2)};
  dispatch(pointers, rule, stream);
}

void sgd(
    const FlatUpdatePointers& pointers,
    SgdScalars s,
    cudaStream_t stream) {
  dispatch(pointers, SgdRule{s}, stream);
}

}  // namespace flatshard::kernels
