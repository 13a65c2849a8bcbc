#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/float8/recipe.h"

/// CUDA kernels on raw device pointers; no torch here. Every function queues on
/// `stream` and returns. The caller checks cudaGetLastError.
namespace flatshard::float8::kernels {

enum class Dtype { f32, bf16 };

/// A row-major tensor.
struct Values {
  const void* data;
  std::int64_t rows;
  std::int64_t columns;
  Dtype dtype;
};

/// The destination of one plane of a tensor; strides as in grid.h.
struct PlanePointers {
  std::uint8_t* data = nullptr;  ///< null: this plane is not requested
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  void* scales = nullptr;
  std::int64_t scale_row_stride = 0;
  std::int64_t scale_column_stride = 0;
  bool given_scales = false;
  /// tensorwise: one; rowwise: one for each row (row plane), or column.
  const float* amax = nullptr;
};

struct Quantize {
  PlanePointers row;
  PlanePointers column;
  std::int64_t padded_rows = 0;  ///< of a transposed column plane
  Recipe recipe;
  Format format;
  Rounding rounding;
};

/// Both planes, or one, in one pass over tiles of 128 x 128. tensorwise and
/// rowwise read `amax`.
void quantize_tiles(const Values& x, const Quantize& args, cudaStream_t stream);

/// tensorwise, row plane: any number of elements in a row.
void quantize_flat(const Values& x, const Quantize& args, cudaStream_t stream);

/// Longest row that quantize_rows supports.
constexpr std::int64_t kMaxRow = 32768;
/// rowwise, row plane, in one pass and with the rows' own amax.
void quantize_rows(const Values& x, const Quantize& args, cudaStream_t stream);

/// amax = max(amax, largest magnitude): zeroed before.
void amax(const Values& x, float* amax, cudaStream_t stream);
/// The same for each row and each column; either may be null.
void row_and_column_amax(
    const Values& x,
    float* rows,
    float* columns,
    cudaStream_t stream);

/// A row plane of e4m3 with a float32 scale for each row; columns are a
/// multiple of 8 and data is aligned to 8 bytes.
struct RowPlane {
  const std::uint8_t* data;
  const float* scales;
  std::int64_t rows;
  std::int64_t columns;
};
/// quantize_tiles and row_and_column_amax of a plane's values, for rowwise. The
/// values are exact in bfloat16.
void requantize_tiles(
    const RowPlane& x,
    const Quantize& args,
    cudaStream_t stream);
void row_and_column_amax(
    const RowPlane& x,
    float* rows,
    float* columns,
    cudaStream_t stream);

struct Dequantize {
  const std::uint8_t* data;
  void* out;
  std::int64_t rows;
  std::int64_t columns;
  const void* scales;
  std::int64_t block_rows;
  std::int64_t block_columns;
  std::int64_t scale_row_stride;
  std::int64_t scale_column_stride;
  bool e8m0;
  Format format;
  Dtype dtype;
};
void dequantize(const Dequantize& args, cudaStream_t stream);

/// out[c][r] = data[r][c].
void transpose_bytes(
    const std::uint8_t* data,
    std::uint8_t* out,
    std::int64_t rows,
    std::int64_t columns,
    cudaStream_t stream);

/// See swizzle_mx_scales of quantize.h.
void swizzle_mx_scales(
    const std::uint8_t* scales,
    std::uint8_t* out,
    std::int64_t outer,
    std::int64_t blocks,
    cudaStream_t stream);

}  // namespace flatshard::float8::kernels
