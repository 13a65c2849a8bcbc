#include "flatshard/ops/kernels/float8_source.cuh"
#include "flatshard/ops/kernels/swiglu_kernels.cuh"

namespace flatshard::nn::kernels {
namespace {

using float8::Format;
using float8::Recipe;
using float8::kernels::zeros;

// Each value rounds to bfloat16, as in the kernel that stores the values. So
// the planes match the stored values.
struct SwigluGradientSource : SwigluGradientValues {
  using Value = Bf16;
  static constexpr int kRowsAtOnce = 4;
  static constexpr int blocks(Recipe) { return 2; }
  static constexpr int kBlocksOfHalves = 2;
  /// Tensorwise gradients are stored first: see swiglu_backward_float8.
  static constexpr bool quantized_with(Recipe recipe) {
    return !float8::traits_of(recipe).has_one_scale();
  }
  struct Loaded {
    Eights dy, gate, up;
  };

  /// Whether both gradients in column c can be computed from one load of dy,
  /// gate and up: no tile has columns of both.
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

  // The tiles of gate and up are adjacent because both read dy and gate.
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

}  // namespace

void quantize_values(
    const SwigluGradientValues& values,
    const float8::kernels::Quantize& a,
    cudaStream_t stream) {
  float8::kernels::quantize_source<Format::e4m3>(
      SwigluGradientSource{values},
      a,
      stream);
}

void values_amax(
    const SwigluGradientValues& values,
    float* amax,
    cudaStream_t stream) {
  float8::kernels::source_amax(SwigluGradientSource{values}, amax, stream);
}

void values_row_and_column_amax(
    const SwigluGradientValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  float8::kernels::source_row_and_column_amax(
      SwigluGradientSource{values},
      rows,
      columns,
      stream);
}

}  // namespace flatshard::nn::kernels
