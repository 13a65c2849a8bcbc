#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "flatshard/float8/recipe.h"

// Tensors to FP8 and back, on the CPU and on CUDA with the same bytes.
namespace flatshard::float8 {

/// The dimension of a tensor [rows, columns] that a matmul will sum over: its
/// rows' elements (a weight [out, in] in the forward pass), or its columns'
/// (the same weight in the gradient of the input).
enum class Axis : std::uint8_t { row, column };

/// One representation of a tensor in FP8. The tensor is [outer, inner] for
/// Axis::row, and its transpose is for Axis::column. Scales are the factors of
/// decoded values, laid out as cuBLASLt reads them:
///
/// | recipe          | shape of scales         | strides                   |
/// |-----------------|-------------------------|---------------------------|
/// | tensorwise      | [] float32              |                           |
/// | rowwise         | [outer] float32         | 1                         |
/// | blockwise       | [outer/128, inner/128]  | inner/128 up to 4's       |
/// |                 | float32                 | multiple, 1               |
/// | blockwise_1x128 | [outer, inner/128]      | 1, outer up to 4's        |
/// |                 | float32                 | multiple                  |
/// | mxfp8           | [outer, inner/32]       | inner/32, 1; see          |
/// |                 | float8_e8m0fnu          | swizzle_mx_scales         |
///
/// A column plane that stays in the tensor's order (`transpose` false) has
/// the shapes above, and strides in which scales of adjacent columns are
/// adjacent.
struct Plane {
  at::Tensor data;    ///< float8_e4m3fn or float8_e5m2
  at::Tensor scales;  ///< see above
};

struct PlaneOptions {
  Axis axis = Axis::row;
  /// Axis::column: data is the transpose [columns, rows], as matmuls on Hopper
  /// need it. False: data is [rows, columns].
  bool transpose = true;
  /// Transposed data gets rows of a multiple of this length, filled up with
  /// zeros. The last block of a row may then be short. A divisor of 128.
  std::int64_t multiple = 1;
  /// tensorwise [] and rowwise [outer]: the largest magnitudes, float32, when
  /// they are known or belong to more than this tensor.
  at::Tensor amax;
  /// The other recipes: the scales to use, laid out as above.
  at::Tensor scales;
};

/// data = encode(x / scale), rounded to nearest, saturating. A block with Inf
/// or NaN gets a NaN scale and NaN data.
///
/// @param x  [rows, columns] float32 or bfloat16
/// @throws Error{config} for dtypes, shapes and options that do not fit.
/// Queues on the current stream.
Plane quantize(
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options = {});

/// Runs quantize into existing memory, such as the memory of a flat buffer.
/// @param out  data and scales of the shapes, strides and dtypes that quantize
///             gives; data may be uint8.
void quantize_into(
    const Plane& out,
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options = {});

/// Returns memory for a plane of a tensor [rows, columns]: data and scales.
/// Only the padding of rows is written.
Plane empty_plane(
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const Quantizer& quantizer,
    const PlaneOptions& options = {});

/// Returns the row plane and the transposed column plane from one reading of x
/// (two for rowwise, and for tensorwise without amax).
/// @param amax  tensorwise: see PlaneOptions.
std::pair<Plane, Plane> quantize_both(
    const at::Tensor& x,
    const Quantizer& quantizer,
    std::int64_t multiple = 1,
    const at::Tensor& amax = {});

struct DequantizeOptions {
  Axis axis = Axis::row;
  bool transpose = true;              ///< as in PlaneOptions
  at::ScalarType dtype = at::kFloat;  ///< or kBFloat16
};
/// decode(data) * scale with the shape of data.
at::Tensor dequantize(
    const Plane& plane,
    Recipe recipe,
    const DequantizeOptions& options = {});

/// Returns the largest magnitude of x [] float32; NaN when x has one. Reduce it
/// over ranks as int32 with max: NaN then wins, and so does Inf over numbers.
at::Tensor amax_of(const at::Tensor& x);

/// [rows, columns] of any dtype of one byte -> [columns, rows].
at::Tensor transpose_bytes(const at::Tensor& data);
/// Does the same into existing memory.
/// @param out  [columns, rows] contiguous, of any dtype of one byte.
void transpose_bytes_into(const at::Tensor& out, const at::Tensor& data);

/// E8M0 scales [outer, blocks] as cuBLASLt reads them (VEC32_UE8M0, sm_100):
/// tiles of 128 x 4, 512 bytes each, filled up with zeros.
/// @return [ceil(outer / 128) * ceil(blocks / 4) * 512]
at::Tensor swizzle_mx_scales(const at::Tensor& scales);

at::ScalarType scalar_type(Format format);

}  // namespace flatshard::float8
