#include "flatshard/float8/kernels/tiles.cuh"

namespace flatshard::float8::kernels {
namespace {

// The values of a row plane. It is half as large as the same in bfloat16.
struct RowPlaneSource {
  using Value = __nv_bfloat16;
  struct Loaded {
    uint2 codes;
    float scale;
  };
  static constexpr int kRowsAtOnce = 8;
  static constexpr int blocks(Recipe) { return 3; }
  static constexpr bool quantized_with(Recipe recipe) {
    return recipe == Recipe::rowwise;
  }
  const std::uint8_t* data;
  const float* scales;
  std::int64_t rows;
  std::int64_t columns;

  __device__ Loaded load(std::int64_t r, std::int64_t c) const {
    if (r >= rows || c >= columns) {
      return {};
    }
    return {*reinterpret_cast<const uint2*>(data + r * columns + c), scales[r]};
  }
  __device__ Eight<Value> finish(const Loaded& v, std::int64_t, std::int64_t)
      const {
    float values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t word = i < 2 ? v.codes.x : v.codes.y;
      const float2 pair = decode2<Format::e4m3>(word >> (i % 2 * 16));
      values[2 * i] = pair.x * v.scale;
      values[2 * i + 1] = pair.y * v.scale;
    }
    Eight<Value> result;
    result.set(values);
    return result;
  }
};

RowPlaneSource source_of(const RowPlane& x) {
  return {x.data, x.scales, x.rows, x.columns};
}

}  // namespace

void requantize_tiles(
    const RowPlane& x,
    const Quantize& a,
    cudaStream_t stream) {
  quantize_source<Format::e4m3>(source_of(x), a, stream);
}

void row_and_column_amax(
    const RowPlane& x,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  source_row_and_column_amax(source_of(x), rows, columns, stream);
}

}  // namespace flatshard::float8::kernels
