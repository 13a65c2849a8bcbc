#include "flatshard/nn/kernels/float8.h"

#include "flatshard/float8/kernels/tiles.cuh"
#include "flatshard/nn/kernels/swiglu.cuh"

namespace flatshard::nn::kernels {
namespace {

using float8::Format;
using float8::Recipe;
using float8::kernels::Eight;
using float8::kernels::load_eight;
using float8::kernels::zeros;

using Bf16 = __nv_bfloat16;
using Eights = Eight<Bf16>;

__device__ inline Eights
load(const void* from, std::int64_t stride, std::int64_t r, std::int64_t c) {
  return *reinterpret_cast<const Eights*>(
      static_cast<const Bf16*>(from) + r * stride + c);
}

// Each rounds to bfloat16, as the kernel that stores the values does: the
// planes are those of the stored values.
struct SwigluSource : SwigluValues {
  using Value = Bf16;
  static constexpr int kRowsAtOnce = 4;
  static constexpr int blocks(Recipe) { return 3; }
  struct Loaded {
    Eights gate, up;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c) const {
    if (r >= rows || c >= columns) {
      return {zeros<Bf16>(), zeros<Bf16>()};
    }
    return {
        kernels::load(gate, gate_stride, r, c),
        kernels::load(up, up_stride, r, c)};
  }
  __device__ Eights finish(const Loaded& v, std::int64_t, std::int64_t) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = swiglu(v.gate[i], sigmoid(v.gate[i]), v.up[i]);
    }
    Eights result;
    result.set(y);
    return result;
  }
};

struct SwigluGradientSource : SwigluGradientValues {
  using Value = Bf16;
  static constexpr int kRowsAtOnce = 4;
  static constexpr int blocks(Recipe) { return 2; }
  static constexpr int kBlocksOfHalves = 2;
  struct Loaded {
    Eights dy, gate, up;
  };

  /// Both gradients of what dy, gate and up are in column c, if no tile of
  /// theirs has columns of both.
  __host__ __device__ bool whole_halves() const {
    return columns % (2 * float8::kernels::kTile) == 0;
  }
  __device__ Loaded load_halves(std::int64_t r, std::int64_t c) const {
    if (r >= rows) {
      return {zeros<Bf16>(), zeros<Bf16>(), zeros<Bf16>()};
    }
    return {
        kernels::load(dy, dy_stride, r, c),
        kernels::load(gate, gate_stride, r, c),
        kernels::load(up, up_stride, r, c)};
  }
  __device__ void finish_halves(const Loaded& v, Eights& dgate, Eights& dup)
      const {
    float of_gate[8];
    float of_up[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient g =
          swiglu_gradient(v.dy[i], v.gate[i], sigmoid(v.gate[i]), v.up[i]);
      of_gate[i] = g.gate;
      of_up[i] = g.up;
    }
    dgate.set(of_gate);
    dup.set(of_up);
  }

  // The tile of gate and that of up beside each other: both read dy and gate.
  __device__ int tile_of_block() const {
    const int block = static_cast<int>(blockIdx.x);
    const int half = static_cast<int>(gridDim.x) / 2;
    return whole_halves() ? block / 2 + block % 2 * half : block;
  }

  __device__ Loaded load(std::int64_t r, std::int64_t c) const {
    if (r >= rows || c >= columns) {
      return {zeros<Bf16>(), zeros<Bf16>(), zeros<Bf16>()};
    }
    const std::int64_t ffn = columns / 2;
    const bool of_up = c >= ffn;
    c = of_up ? c - ffn : c;
    return {
        kernels::load(dy, dy_stride, r, c),
        kernels::load(gate, gate_stride, r, c),
        of_up ? zeros<Bf16>() : kernels::load(up, up_stride, r, c)};
  }
  __device__ Eights
  finish(const Loaded& v, std::int64_t, std::int64_t c) const {
    const bool of_up = c >= columns / 2;
    float d[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient g =
          swiglu_gradient(v.dy[i], v.gate[i], sigmoid(v.gate[i]), v.up[i]);
      d[i] = of_up ? g.up : g.gate;
    }
    Eights result;
    result.set(d);
    return result;
  }
};

template <class Weight>
struct NormSource : NormValues {
  using Value = Bf16;
  static constexpr int kRowsAtOnce = 8;
  static constexpr int blocks(Recipe recipe) {
    const bool one_scale =
        recipe == Recipe::tensorwise || recipe == Recipe::blockwise;
    return one_scale ? 4 : 3;
  }
  using Loaded = Eights;

  __device__ Loaded load(std::int64_t r, std::int64_t c) const {
    return r < rows && c < columns ? kernels::load(x, columns, r, c)
                                   : zeros<Bf16>();
  }
  __device__ Eights
  finish(const Loaded& v, std::int64_t r, std::int64_t c) const {
    if (r >= rows || c >= columns) {
      return v;
    }
    const float scale = rstd[r];
    const auto w = *reinterpret_cast<const Eight<Weight>*>(
        static_cast<const Weight*>(weight) + c);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = w[i] * (v[i] * scale);
    }
    Eights result;
    result.set(y);
    return result;
  }
};

// Calls run(source).
template <class Run>
void with_source(const Float8Values& values, Run&& run) {
  if (const auto* swiglu = std::get_if<SwigluValues>(&values)) {
    run(SwigluSource{*swiglu});
  } else if (
      const auto* gradient = std::get_if<SwigluGradientValues>(&values)) {
    run(SwigluGradientSource{*gradient});
  } else if (const auto& norm = std::get<NormValues>(values);
             norm.float_weight) {
    run(NormSource<float>{norm});
  } else {
    run(NormSource<Bf16>{norm});
  }
}

}  // namespace

void quantize_values(
    const Float8Values& values,
    const float8::kernels::Quantize& a,
    cudaStream_t stream) {
  with_source(values, [&]<class Source>(const Source& source) {
    using float8::kernels::quantize_source;
    if constexpr (std::is_same_v<Source, SwigluGradientSource>) {
      if (a.format == Format::e5m2) {
        return quantize_source<Format::e5m2>(source, a, stream);
      }
    }
    quantize_source<Format::e4m3>(source, a, stream);
  });
}

void values_amax(const Float8Values& values, float* amax, cudaStream_t stream) {
  with_source(values, [&](const auto& source) {
    float8::kernels::source_amax(source, amax, stream);
  });
}

void values_row_and_column_amax(
    const Float8Values& values,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  with_source(values, [&](const auto& source) {
    float8::kernels::source_row_and_column_amax(source, rows, columns, stream);
  });
}

}  // namespace flatshard::nn::kernels
