#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/quantize.h"

namespace flatshard::float8 {

/// Which scale belongs to element (r, c) of a tensor [rows, columns]:
/// scales[r / block_rows * row_stride + c / block_columns * column_stride].
struct ScaleGrid {
  std::int64_t block_rows = 1;
  std::int64_t block_columns = 1;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
};

/// A plane of a tensor [rows, columns] and the places of its parts. Element (r,
/// c) of the tensor is byte r * row_stride + c * column_stride of data.
struct PlaneView {
  Plane plane;
  ScaleGrid grid;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
  /// Rows including those that are zeros (`multiple`).
  std::int64_t padded_rows = 0;
  bool given_scales = false;
  at::Tensor amax;  ///< when given

  std::uint8_t* data() const {
    return static_cast<std::uint8_t*>(plane.data.data_ptr());
  }
  void* scales() const { return plane.scales.data_ptr(); }
};

/// Returns the grid of `scales` in the layout of Plane.
ScaleGrid scale_grid(
    Recipe recipe,
    Axis axis,
    std::int64_t rows,
    std::int64_t columns,
    const at::Tensor& scales);

/// Returns memory for a plane of x.
/// @throws Error{config} when x, the recipe and the options do not fit.
PlaneView make_plane(
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options);

/// Makes the same over existing memory.
PlaneView plane_over(
    const Plane& out,
    std::int64_t rows,
    std::int64_t columns,
    const Quantizer& quantizer,
    const PlaneOptions& options);

/// @throws Error{config} unless x is [rows, columns] float32 or bfloat16 on the
/// CPU or CUDA.
void check_tensor(const at::Tensor& x);

}  // namespace flatshard::float8
