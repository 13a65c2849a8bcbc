#include "flatshard/ops/kernels/float8_source.cuh"

namespace flatshard::nn::kernels {
namespace {

using float8::Format;
using float8::Recipe;
using float8::kernels::Eight;
using float8::kernels::zeros;

// Each value rounds to bfloat16, as in the kernel that stores the values. So
// the planes match the stored values.
template <class Weight>
struct NormSource : NormValues {
  using Value = Bf16;
  static constexpr int kRowsAtOnce = 8;
  static constexpr int blocks(Recipe recipe) {
    return float8::traits_of(recipe).rows_share_scales() ? 4 : 3;
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

template <class Run>
void with_source(const NormValues& values, Run&& run) {
  if (values.float_weight) {
    run(NormSource<float>{values});
  } else {
    run(NormSource<Bf16>{values});
  }
}

}  // namespace

void quantize_values(
    const NormValues& values,
    const float8::kernels::Quantize& a,
    cudaStream_t stream) {
  with_source(values, [&](const auto& source) {
    float8::kernels::quantize_source<Format::e4m3>(source, a, stream);
  });
}

void values_amax(const NormValues& values, float* amax, cudaStream_t stream) {
  with_source(values, [&](const auto& source) {
    float8::kernels::source_amax(source, amax, stream);
  });
}

void values_row_and_column_amax(
    const NormValues& values,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  with_source(values, [&](const auto& source) {
    float8::kernels::source_row_and_column_amax(source, rows, columns, stream);
  });
}

}  // namespace flatshard::nn::kernels
