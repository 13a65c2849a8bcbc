#include "flatshard/ops/kernels/float8_source.cuh"
#include "flatshard/ops/kernels/swiglu_kernels.cuh"

namespace flatshard::nn::kernels {
namespace {

using float8::Format;
using float8::Recipe;
using float8::kernels::zeros;

// Each value rounds to bfloat16, as in the kernel that stores the values. So
// the planes match the stored values.
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

}  // namespace

void quantize_values(
    const SwigluValues& values,
    const float8::kernels::Quantize& a,
    cudaStream_t stream) {
  float8::kernels::quantize_source<Format::e4m3>(
      SwigluSource{values},
      a,
      stream);
}

void values_amax(const SwigluValues& values, float* amax, cudaStream_t stream) {
  float8::kernels::source_amax(SwigluSource{values}, amax, stream);
}

void values_row_and_column_amax(
    const SwigluValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  float8::kernels::source_row_and_column_amax(
      SwigluSource{values},
      rows,
      columns,
      stream);
}

}  // namespace flatshard::nn::kernels
