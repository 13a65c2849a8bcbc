#include "flatshard/float8/quantize.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/float8/cpu_ops.h"
#include "flatshard/float8/cuda_float8_ops.h"
#include "flatshard/float8/grid.h"

namespace flatshard::float8 {
namespace {

Format format_of_data(const at::Tensor& data) {
  FLATSHARD_CHECK(
      data.defined() && data.dim() == 2 &&
          (data.scalar_type() == at::kFloat8_e4m3fn ||
           data.scalar_type() == at::kFloat8_e5m2),
      config,
      "data: expected [rows, columns] of float8_e4m3fn or float8_e5m2, got {}",
      data.defined() ? data.toString() + c10::str(data.sizes()) : "none");
  return data.scalar_type() == at::kFloat8_e4m3fn ? Format::e4m3 : Format::e5m2;
}

// Returns whether scales have the shape that Plane defines for data [outer,
// inner].
bool fits(
    const at::Tensor& scales,
    Recipe recipe,
    std::int64_t outer,
    std::int64_t inner) {
  const RecipeTraits traits = traits_of(recipe);
  if (traits.has_one_scale()) {
    return scales.dim() == 0;
  }
  if (traits.block_inner == 0) {
    return scales.sizes() == at::IntArrayRef{outer};
  }
  return scales.sizes() == at::IntArrayRef{
                               ceil_div(outer, traits.block_outer),
                               ceil_div(inner, traits.block_inner)};
}

void fill(
    const PlaneView& view,
    const at::Tensor& x,
    const Quantizer& quantizer,
    Axis axis) {
  const at::Tensor values = x.detach().contiguous();
  if (x.is_cpu()) {
    cpu::quantize(values, quantizer, view);
  } else if (axis == Axis::row) {
    cuda::quantize(values, quantizer, &view, nullptr);
  } else {
    cuda::quantize(values, quantizer, nullptr, &view);
  }
}

void check_out(
    const Plane& out,
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options) {
  check_tensor(x);
  // Sizes and strides only: no memory.
  const Plane like = empty_plane(
      x.size(0),
      x.size(1),
      at::Device(at::kMeta),
      quantizer,
      {.axis = options.axis,
       .transpose = options.transpose,
       .multiple = options.multiple});
  const auto fits = [&](const at::Tensor& got, const at::Tensor& want) {
    return got.defined() && got.sizes() == want.sizes() &&
           got.strides() == want.strides() && got.device() == x.device() &&
           got.element_size() == want.element_size();
  };
  FLATSHARD_CHECK(
      fits(out.data, like.data) && fits(out.scales, like.scales),
      config,
      "out: expected data {} with strides {} and scales {} with strides {}",
      c10::str(like.data.sizes()),
      c10::str(like.data.strides()),
      c10::str(like.scales.sizes()),
      c10::str(like.scales.strides()));
}

}  // namespace

at::ScalarType scalar_type(Format format) {
  return format == Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

Plane quantize(
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options) {
  const PlaneView view = make_plane(x, quantizer, options);
  fill(view, x, quantizer, options.axis);
  return view.plane;
}

void quantize_into(
    const Plane& out,
    const at::Tensor& x,
    const Quantizer& quantizer,
    const PlaneOptions& options) {
  check_out(out, x, quantizer, options);
  fill(
      plane_over(out, x.size(0), x.size(1), quantizer, options),
      x,
      quantizer,
      options.axis);
}

std::pair<Plane, Plane> quantize_both(
    const at::Tensor& x,
    const Quantizer& quantizer,
    std::int64_t multiple,
    const at::Tensor& amax) {
  FLATSHARD_CHECK(
      !amax.defined() || traits_of(quantizer.recipe).has_one_scale(),
      config,
      "amax: expected none for both planes of recipe {}",
      to_string(quantizer.recipe));
  const PlaneView row = make_plane(x, quantizer, {.amax = amax});
  const PlaneView column = make_plane(
      x,
      quantizer,
      {.axis = Axis::column, .multiple = multiple, .amax = amax});
  const at::Tensor values = x.detach().contiguous();
  if (x.is_cpu()) {
    cpu::quantize(values, quantizer, row);
    cpu::quantize(values, quantizer, column);
  } else {
    cuda::quantize(values, quantizer, &row, &column);
  }
  return {row.plane, column.plane};
}

at::Tensor dequantize(
    const Plane& plane,
    Recipe recipe,
    const DequantizeOptions& options) {
  const Format format = format_of_data(plane.data);
  FLATSHARD_CHECK(
      options.dtype == at::kFloat || options.dtype == at::kBFloat16,
      config,
      "dtype: expected float32 or bfloat16, got {}",
      c10::toString(options.dtype));
  // A transposed column plane is the row plane of the transpose.
  const bool as_rows = options.axis == Axis::row || options.transpose;
  const at::Tensor data = plane.data.contiguous();
  const std::int64_t rows = data.size(0);
  const std::int64_t columns = data.size(1);
  const auto wanted = traits_of(recipe).scale == ScaleKind::e8m0
                          ? at::kFloat8_e8m0fnu
                          : at::kFloat;
  FLATSHARD_CHECK(
      plane.scales.defined() && plane.scales.scalar_type() == wanted &&
          plane.scales.device() == data.device() &&
          fits(
              plane.scales,
              recipe,
              as_rows ? rows : columns,
              as_rows ? columns : rows),
      config,
      "scales: expected {} for data {} along axis {}, got {}{}",
      to_string(recipe),
      c10::str(data.sizes()),
      as_rows ? "row" : "column",
      plane.scales.defined() ? plane.scales.toString() : "none",
      plane.scales.defined() ? c10::str(plane.scales.sizes()) : "");
  const ScaleGrid grid = scale_grid(
      recipe,
      as_rows ? Axis::row : Axis::column,
      rows,
      columns,
      plane.scales);
  const bool cpu = data.is_cpu();
  at::Tensor out = at::empty(
      data.sizes(),
      data.options().dtype(cpu ? at::kFloat : options.dtype));
  if (cpu) {
    cpu::dequantize(data, format, grid, plane.scales, out);
    return out.to(options.dtype);
  }
  cuda::dequantize(data, format, grid, plane.scales, out);
  return out;
}

at::Tensor amax_of(const at::Tensor& x) {
  FLATSHARD_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      config,
      "amax: expected a float32 or bfloat16 tensor, got {}",
      c10::toString(x.scalar_type()));
  const at::Tensor values = x.detach().contiguous();
  return x.is_cpu() ? at::full({}, cpu::amax_of(values), at::kFloat)
                    : cuda::amax_of(values);
}

at::Tensor transpose_bytes(const at::Tensor& data) {
  FLATSHARD_CHECK(
      data.dim() == 2 && data.element_size() == 1,
      config,
      "transpose_bytes: expected [rows, columns] of one byte each, got {}{}",
      data.toString(),
      c10::str(data.sizes()));
  at::Tensor out = at::empty({data.size(1), data.size(0)}, data.options());
  transpose_bytes_into(out, data);
  return out;
}

void transpose_bytes_into(const at::Tensor& out, const at::Tensor& data) {
  FLATSHARD_CHECK(
      data.dim() == 2 && data.element_size() == 1 && out.is_contiguous() &&
          out.element_size() == 1 && out.device() == data.device() &&
          out.sizes() == at::IntArrayRef({data.size(1), data.size(0)}),
      config,
      "transpose_bytes_into: expected data [rows, columns] and contiguous "
      "memory [columns, rows] of one byte each, got {}{} and {}{}",
      data.toString(),
      c10::str(data.sizes()),
      out.toString(),
      c10::str(out.sizes()));
  const at::Tensor bytes = data.contiguous().view(at::kByte);
  at::Tensor to = out.view(at::kByte);
  if (data.is_cpu()) {
    to.copy_(bytes.t());
  } else {
    cuda::transpose_bytes(bytes, to);
  }
}

at::Tensor swizzle_mx_scales(const at::Tensor& scales) {
  FLATSHARD_CHECK(
      scales.dim() == 2 && scales.scalar_type() == at::kFloat8_e8m0fnu,
      config,
      "swizzle_mx_scales: expected [outer, blocks] float8_e8m0fnu, got {}{}",
      scales.toString(),
      c10::str(scales.sizes()));
  const at::Tensor bytes = scales.contiguous().view(at::kByte);
  const std::int64_t tiles_down = ceil_div(scales.size(0), 128);
  const std::int64_t tiles_across = ceil_div(scales.size(1), 4);
  if (scales.is_cpu()) {
    at::Tensor padded =
        at::zeros({tiles_down * 128, tiles_across * 4}, bytes.options());
    padded.narrow(0, 0, scales.size(0))
        .narrow(1, 0, scales.size(1))
        .copy_(bytes);
    return padded.view({tiles_down, 4, 32, tiles_across, 4})
        .permute({0, 3, 2, 1, 4})
        .contiguous()
        .flatten()
        .view(at::kFloat8_e8m0fnu);
  }
  at::Tensor out =
      at::empty({tiles_down * tiles_across * 512}, bytes.options());
  cuda::swizzle_mx_scales(bytes, out);
  return out.view(at::kFloat8_e8m0fnu);
}

}  // namespace flatshard::float8
