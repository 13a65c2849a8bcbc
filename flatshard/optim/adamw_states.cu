#include "flatshard/core/rounding.h"
#include "flatshard/device/philox_rounds.cuh"
#include "flatshard/device/with_float_dtype.cuh"
#include "flatshard/float8/kernels/codec.cuh"
#include "flatshard/optim/flat_update.cuh"
#include "flatshard/optim/update_rules.h"

#include <algorithm>
#include <type_traits>

namespace flatshard::kernels {
namespace {

using float_arithmetic::plus;
using float_arithmetic::times;

// Returns sqrt(x) rounded to nearest, for x in [2^-101, inf). As nvcc's
// __fsqrt_rn, without its branch.
__device__ float root_of_normal(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float root = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(r, 0.5F), root);
}

// Returns a / b rounded to nearest, for |a| in [2^-100, 2^62] and b in
// [2^-64, 2^24]. As nvcc's __fdiv_rn, without its branch.
__device__ float quotient_of_normal(float a, float b) {
  float r = state_format::near_reciprocal(b);
  r = __fmaf_rn(r, __fmaf_rn(-b, r, 1.0F), r);
  return state_format::near_quotient(a, b, r);
}

constexpr float kByteBase = 8388608.0F;  // 2^23

// Returns byte j of a word, added to 2^23: it becomes the mantissa.
__device__ float byte_above_base(std::uint32_t word, int j) {
  return float8::float_of(__byte_perm(word, 0x4B000000U, 0x7440U + j));
}

// A thread's part of a warp's block: four adjacent elements, and four that are
// half a block further. So all accesses of a warp are contiguous.
constexpr int kQuads = 2;
// Blocks of kThreads of an SM: registers are enough for these, not for more.
constexpr int kStateBlocks = 4;
constexpr int kQuadStride = kStateBlock / kQuads;
static_assert(kStateBlock == 32 * kVector * kQuads);

struct Quads {
  float v[kQuads][kVector];
  __device__ void set(int quad, float4 of) {
    v[quad][0] = of.x;
    v[quad][1] = of.y;
    v[quad][2] = of.z;
    v[quad][3] = of.w;
  }
  __device__ float4 quad(int i) const {
    return {v[i][0], v[i][1], v[i][2], v[i][3]};
  }
};

// Codes as they are stored, read before anything waits for them.
struct StateCodes {
  std::uint32_t word[kQuads];
  float scale;
};

__device__ StateCodes load_codes(const StatePointers& s, std::uint64_t at) {
  StateCodes codes;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    codes.word[q] =
        *reinterpret_cast<const std::uint32_t*>(s.codes + at + q * kQuadStride);
  }
  codes.scale = s.scales[at / kStateBlock];
  return codes;
}

__device__ void
decode_exp_avg(std::uint32_t word, float scale, float (&to)[kVector]) {
  const std::uint32_t bytes = word ^ 0x80808080U;  // int8 + 128
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    to[j] = state_format::decode_exp_avg(
        plus(byte_above_base(bytes, j), -(kByteBase + 128.0F)),
        scale);
  }
}

__device__ void
decode_exp_avg_sq(std::uint32_t word, float scale, float (&to)[kVector]) {
  using state_format::kOf255;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    // As state_format::decode_exp_avg_sq: rounds code * kOf255 once, because
    // 2^23 * kOf255 is exact.
    const float code =
        __fmaf_rn(byte_above_base(word, j), kOf255, -kByteBase * kOf255);
    const float root = times(scale, code);
    to[j] = times(root, root);
  }
}

__device__ void store_codes(
    const std::uint32_t (&code)[kQuads][kVector],
    float scale,
    const StatePointers& s,
    std::uint64_t at) {
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    *reinterpret_cast<std::uint32_t*>(s.codes + at + q * kQuadStride) =
        __byte_perm(
            __byte_perm(code[q][0], code[q][1], 0x0040U),
            __byte_perm(code[q][2], code[q][3], 0x0040U),
            0x5410U);
  }
  if (threadIdx.x % 32 == 0) {
    s.scales[at / kStateBlock] = scale;
  }
}

// Encodes the warp's block of exp_avg. `largest` are the bits of the thread's
// largest magnitude.
__device__ void encode_exp_avg(
    const Quads& m,
    std::uint32_t largest,
    const StatePointers& s,
    std::uint64_t at) {
  const float scale =
      state_format::scale_of(__reduce_max_sync(0xffffffffU, largest));
  const float inverse = state_format::inverse_of(1.0F, scale);
  std::uint32_t code[kQuads][kVector];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      code[q][j] = state_format::encode_exp_avg(m.v[q][j], inverse);
    }
  }
  store_codes(code, scale, s, at);
}

// As encode_exp_avg, from the square roots.
__device__ void encode_exp_avg_sq(
    const Quads& root,
    std::uint32_t largest,
    const StatePointers& s,
    std::uint64_t at) {
  const float scale = float8::float_of(__reduce_max_sync(0xffffffffU, largest));
  const float inverse = state_format::inverse_of(255.0F, scale);
  std::uint32_t code[kQuads][kVector];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      code[q][j] = state_format::encode_exp_avg_sq(root.v[q][j], inverse);
    }
  }
  store_codes(code, scale, s, at);
}

// Stores bfloat16 main weights from element e of the shard on, rounded
// stochastically. `drawn` are the random words of `block`.
__device__ void store_rounded(
    const FlatUpdatePointers& p,
    std::int64_t e,
    float4 w,
    const RoundingRange*& range,
    std::uint64_t& block,
    uint4& drawn) {
  const RoundingRange& own =
      p.rounding_ranges[range_of(p.rounding_ranges, p.num_rounding_ranges, e)];
  const std::int64_t element = e + own.shift;
  const std::uint64_t wanted = stochastic_rounding::block_of(element);
  if (range != &own || wanted != block) {
    drawn = {
        static_cast<std::uint32_t>(wanted),
        static_cast<std::uint32_t>(wanted >> 32),
        static_cast<std::uint32_t>(p.rounding_step),
        static_cast<std::uint32_t>(p.rounding_step >> 32)};
    philox(
        drawn,
        static_cast<std::uint32_t>(own.key),
        static_cast<std::uint32_t>(own.key >> 32));
    range = &own;
    block = wanted;
  }
  // The element is a multiple of 4, so its four have one half of the words.
  const bool second = stochastic_rounding::half_of(element) >= 4;
  const std::uint32_t a = second ? drawn.z : drawn.x;
  const std::uint32_t b = second ? drawn.w : drawn.y;
  using stochastic_rounding::round;
  const auto lo = round(w.x, a & 0xffffU) |
                  static_cast<std::uint32_t>(round(w.y, a >> 16)) << 16;
  const auto hi = round(w.z, b & 0xffffU) |
                  static_cast<std::uint32_t>(round(w.w, b >> 16)) << 16;
  reinterpret_cast<uint2*>(p.main)[e / kVector] = {lo, hi};
}

__device__ Quads load_quads(
    const StatePointers& s,
    StateFormat format,
    std::int64_t at,
    std::int64_t num) {
  Quads quads = {};
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (q * kQuadStride < num) {
      const std::int64_t i = (at + q * kQuadStride) / kVector;
      quads.set(
          q,
          format == StateFormat::float32 ? load4<float>(s.float32, i)
                                         : load4<__nv_bfloat16>(s.bfloat16, i));
    }
  }
  return quads;
}

__device__ void store_quads(
    const Quads& quads,
    const StatePointers& s,
    StateFormat format,
    std::int64_t at,
    std::int64_t num) {
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (q * kQuadStride < num) {
      const std::int64_t i = (at + q * kQuadStride) / kVector;
      if (format == StateFormat::float32) {
        store4<float>(s.float32, i, quads.quad(q));
      } else {
        store4<__nv_bfloat16>(s.bfloat16, i, quads.quad(q));
      }
    }
  }
}

__device__ float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The largest numbers of a thread's elements.
struct Largest {
  float m = 0;
  std::uint32_t root = 0;  ///< bits
};

// AdamW for elements that share a row. Computes square roots and quotients
// without branches, and once more in the few threads with an unusual number.
// Replaces v by its square root.
__device__ void update_quad(
    const UpdateRow& s,
    float (&w)[kVector],
    const float (&g)[kVector],
    float (&m)[kVector],
    float (&v)[kVector],
    Largest& largest) {
  Largest own;
  float least_numerator = 1.0F;
  std::uint32_t least_v = ~0U;
  float quotient[kVector];
  float root[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    AdamWRule::update_moments(s, g[j], m[j], v[j]);
    root[j] = root_of_normal(v[j]);
    const float numerator = AdamWRule::numerator(s, m[j]);
    quotient[j] =
        quotient_of_normal(numerator, AdamWRule::denominator(s, root[j]));
    own.m = larger_or_nan(own.m, fabsf(m[j]));
    own.root = max(own.root, float8::bits_of(root[j]));
    least_numerator = fminf(least_numerator, fabsf(numerator));
    least_v = min(least_v, float8::bits_of(v[j]));
  }
  const bool is_usual =
      float8::float_of(least_v) >= 0x1p-101F &&
      AdamWRule::denominator(s, 0x1p-51F) >= 0x1p-64F &&
      AdamWRule::denominator(s, float8::float_of(own.root)) <= 0x1p24F &&
      least_numerator >= 0x1p-100F &&
      fabsf(AdamWRule::numerator(s, own.m)) <= 0x1p62F;
  if (!is_usual) {
    own.root = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      root[j] = __fsqrt_rn(v[j]);
      quotient[j] = __fdiv_rn(
          AdamWRule::numerator(s, m[j]),
          AdamWRule::denominator(s, root[j]));
      own.root = max(own.root, float8::bits_of(root[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    w[j] = AdamWRule::updated(s, w[j], quotient[j]);
    v[j] = root[j];
  }
  largest.m = larger_or_nan(largest.m, own.m);
  largest.root = max(largest.root, own.root);
}

template <class T>
__device__ const void* element(const void* base, std::uint64_t i) {
  return static_cast<const T*>(base) + i;
}
template <class T>
__device__ void* element(void* base, std::uint64_t i) {
  return static_cast<T*>(base) + i;
}

// Stores four new weights, `quad` quads after element e.
template <class Main, class Compute, bool Stochastic>
struct WeightWriter {
  __device__ void
  store(const FlatUpdatePointers& p, std::uint64_t e, int quad, float4 w) {
    const int i = quad * kQuadStride / kVector;
    if constexpr (Stochastic) {
      store_rounded(p, e + quad * kQuadStride, w, rounding, block, drawn);
    } else {
      store4<Main>(element<Main>(p.main, e), i, w);
    }
    if constexpr (!std::is_same_v<Compute, NoCompute>) {
      store4<Compute>(element<Compute>(p.compute, e), i, w);
    }
  }

  // The last random words, and the range and block that they were drawn for.
  const RoundingRange* rounding = nullptr;
  std::uint64_t block = 0;
  uint4 drawn = {};
};

// Updates a complete block with int8 states, quad by quad: few values stay in
// registers. All elements have `row`.
template <class Main, class Grad, class Writer>
__device__ void update_int8(
    const FlatUpdatePointers& p,
    const UpdateRow& row,
    float scale,
    std::uint64_t e,
    std::uint64_t at) {
  float4 main[kQuads];
  float4 grad[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    main[q] = load4<Main>(element<Main>(p.main, e), q * kQuadStride / kVector);
    grad[q] = load4<Grad>(element<Grad>(p.grad, e), q * kQuadStride / kVector);
  }
  const StateCodes first = load_codes(p.exp_avg, at);
  const StateCodes second = load_codes(p.exp_avg_sq, at);
  Quads m;
  Quads root;
  Largest largest;
  Writer writer;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    float w[kVector] = {main[q].x, main[q].y, main[q].z, main[q].w};
    const float g[kVector] = {
        times(grad[q].x, scale),
        times(grad[q].y, scale),
        times(grad[q].z, scale),
        times(grad[q].w, scale)};
    decode_exp_avg(first.word[q], first.scale, m.v[q]);
    decode_exp_avg_sq(second.word[q], second.scale, root.v[q]);
    update_quad(row, w, g, m.v[q], root.v[q], largest);
    writer.store(p, e, q, {w[0], w[1], w[2], w[3]});
  }
  encode_exp_avg(m, float8::bits_of(largest.m), p.exp_avg, at);
  encode_exp_avg_sq(root, largest.root, p.exp_avg_sq, at);
}

// A warp has a block of kStateBlock elements. Of several formats, and with
// int8, the ranges and the shard are multiples of it.
template <class Main, class Grad, class Compute, bool Stochastic>
__global__ void __launch_bounds__(kThreads, kStateBlocks)
    states_kernel(const FlatUpdatePointers p) {
  using Writer = WeightWriter<Main, Compute, Stochastic>;
  const std::int64_t begin =
      (std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32) *
      kStateBlock;
  if (begin >= p.numel) {
    return;
  }
  const int lane_at = static_cast<int>(threadIdx.x % 32) * kVector;
  const std::uint64_t e = begin + lane_at;
  const std::int64_t last = min(begin + kStateBlock, p.numel) - 1;
  int group = 0;
  bool is_one_group = true;
  if (p.num_ranges > 0) {
    const UpdateRange& of = p.ranges[range_of(p.ranges, p.num_ranges, begin)];
    group = of.group;
    is_one_group = of.end > last;
    if (is_one_group && group == UpdateRange::kSkipped) {
      return;
    }
  }
  const StateRange range =
      p.num_state_ranges == 0
          ? StateRange{.end = p.numel}
          : p.state_ranges[range_of(p.state_ranges, p.num_state_ranges, begin)];
  const std::uint64_t at = e + range.shift;
  const float scale = p.grad_scale == nullptr ? 1.0F : *p.grad_scale;
  if (range.format == StateFormat::int8) {
    const UpdateRow row = p.num_ranges == 0 ? p.row : p.rows[group];
    update_int8<Main, Grad, Writer>(p, row, scale, e, at);
    return;
  }

  const int num = static_cast<int>(last + 1 - begin) - lane_at;
  Quads m = load_quads(p.exp_avg, range.format, at, num);
  Quads v = load_quads(p.exp_avg_sq, range.format, at, num);
  Writer writer;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (q * kQuadStride >= num) {
      continue;
    }
    const int i = q * kQuadStride / kVector;
    float4 w = load4<Main>(element<Main>(p.main, e), i);
    float4 g = load4<Grad>(element<Grad>(p.grad, e), i);
    g = {
        times(g.x, scale),
        times(g.y, scale),
        times(g.z, scale),
        times(g.w, scale)};
    float4 a = m.quad(q);
    float4 b = v.quad(q);
    if (is_one_group) {
      const UpdateRow row = p.num_ranges == 0 ? p.row : p.rows[group];
      update4<AdamWRule>(row, w, g, a, b);
    } else {
      const std::int64_t first = begin + lane_at + q * kQuadStride;
      update_by_range<AdamWRule>(p, first, w.x, g.x, a.x, b.x);
      update_by_range<AdamWRule>(p, first + 1, w.y, g.y, a.y, b.y);
      update_by_range<AdamWRule>(p, first + 2, w.z, g.z, a.z, b.z);
      update_by_range<AdamWRule>(p, first + 3, w.w, g.w, a.w, b.w);
    }
    m.set(q, a);
    v.set(q, b);
    writer.store(p, e, q, w);
  }
  store_quads(m, p.exp_avg, range.format, at, num);
  store_quads(v, p.exp_avg_sq, range.format, at, num);
}

template <class Main, class Grad, class Compute, bool Stochastic>
void launch_states(const FlatUpdatePointers& p, cudaStream_t stream) {
  constexpr std::int64_t kEach = kThreads / 32 * kStateBlock;
  const auto grid = static_cast<unsigned>(
      std::max<std::int64_t>(ceil_div(p.numel, kEach), 1));
  states_kernel<Main, Grad, Compute, Stochastic>
      <<<grid, kThreads, 0, stream>>>(p);
}

template <class Grad>
void dispatch_states(const FlatUpdatePointers& p, cudaStream_t stream) {
  using BFloat16 = __nv_bfloat16;
  if (p.main_dtype == FloatDtype::bfloat16) {
    return p.rounding_ranges != nullptr
               ? launch_states<BFloat16, Grad, NoCompute, true>(p, stream)
               : launch_states<BFloat16, Grad, NoCompute, false>(p, stream);
  }
  if (p.compute == nullptr) {
    return launch_states<float, Grad, NoCompute, false>(p, stream);
  }
  with_dtype(p.compute_dtype, [&]<class Compute>(Compute) {
    launch_states<float, Grad, Compute, false>(p, stream);
  });
}

}  // namespace

void adamw_states(const FlatUpdatePointers& p, cudaStream_t stream) {
  with_dtype(p.grad_dtype, [&]<class Grad>(Grad) {
    dispatch_states<Grad>(p, stream);
  });
}

}  // namespace flatshard::kernels
