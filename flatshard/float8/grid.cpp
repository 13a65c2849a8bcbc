#include "flatshard/float8/grid.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"

namespace flatshard::float8 {
namespace {

// Returns memory whose rows are filled up with zeros to a multiple of 4, for
// TMA.
at::Tensor
padded_rows(std::int64_t rows, std::int64_t columns, at::TensorOptions to) {
  const std::int64_t wide = round_up(columns, 4);
  return wide == columns ? at::empty({rows, columns}, to)
                         : at::zeros({rows, wide}, to).narrow(1, 0, columns);
}

at::Tensor make_scales(
    Recipe recipe,
    bool as_the_tensor_lies,
    std::int64_t outer,
    std::int64_t inner,
    at::Device device) {
  const at::TensorOptions f32 = at::TensorOptions(device).dtype(at::kFloat);
  const RecipeTraits traits = traits_of(recipe);
  if (traits.has_one_scale()) {
    return at::empty({}, f32);
  }
  if (traits.block_inner == 0) {
    return at::empty({outer}, f32);
  }
  const std::int64_t rows = ceil_div(outer, traits.block_outer);
  const std::int64_t columns = ceil_div(inner, traits.block_inner);
  if (traits.scale == ScaleKind::e8m0) {
    const auto e8m0 = f32.dtype(at::kFloat8_e8m0fnu);
    return as_the_tensor_lies ? at::empty({columns, rows}, e8m0).t()
                              : at::empty({rows, columns}, e8m0);
  }
  // Float scales of single rows are stored column by column in any case.
  return as_the_tensor_lies || !traits.rows_share_scales()
             ? padded_rows(columns, rows, f32).t()
             : padded_rows(rows, columns, f32);
}

void check_divides(
    Recipe recipe,
    const char* what,
    std::int64_t size,
    std::int64_t block) {
  FLATSHARD_CHECK(
      block == 0 || size % block == 0,
      config,
      "{}: expected {} divisible by {}, got {}; leave this tensor in "
      "bfloat16, or use another recipe",
      to_string(recipe),
      what,
      block,
      size);
}

void check_options(const Quantizer& q, const PlaneOptions& options) {
  FLATSHARD_CHECK(
      q.rounding == Rounding::up || has_power_of_two_scales(q.recipe),
      config,
      "rounding = 'floor' does not fit {}, because its scales are {}.0 / "
      "amax; use 'up', or recipe rowwise or mxfp8",
      to_string(q.recipe),
      static_cast<int>(traits_of(q.format).largest));
  FLATSHARD_CHECK(
      options.multiple >= 1 && kBlock % options.multiple == 0 &&
          (options.multiple == 1 ||
           (options.axis == Axis::column && options.transpose)),
      config,
      "multiple: expected 1, or a divisor of {} for a transposed column plane, "
      "got {}",
      kBlock,
      options.multiple);
  const bool takes_amax = traits_of(q.recipe).block_inner == 0;
  FLATSHARD_CHECK(
      !options.amax.defined() || takes_amax,
      config,
      "amax cannot be given for recipe {}, because its blocks are local; give "
      "scales",
      to_string(q.recipe));
  FLATSHARD_CHECK(
      !options.scales.defined() || !takes_amax,
      config,
      "scales: expected none for recipe {}; give amax",
      to_string(q.recipe));
}

void check_given(
    const char* what,
    const at::Tensor& given,
    const at::Tensor& like) {
  FLATSHARD_CHECK(
      given.sizes() == like.sizes() &&
          given.scalar_type() == like.scalar_type() &&
          given.device() == like.device() && given.strides() == like.strides(),
      config,
      "{}: expected {} {} with strides {} on {}, got {} {} with strides {} on "
      "{}",
      what,
      c10::toString(like.scalar_type()),
      c10::str(like.sizes()),
      c10::str(like.strides()),
      like.device().str(),
      c10::toString(given.scalar_type()),
      c10::str(given.sizes()),
      c10::str(given.strides()),
      given.device().str());
}

}  // namespace

ScaleGrid scale_grid(
    Recipe recipe,
    Axis axis,
    std::int64_t rows,
    std::int64_t columns,
    const at::Tensor& scales) {
  const bool row = axis == Axis::row;
  const std::int64_t outer = row ? rows : columns;
  const std::int64_t inner = row ? columns : rows;
  const RecipeTraits traits = traits_of(recipe);
  const auto size_of = [](std::int64_t block, std::int64_t all) {
    return block == 0 ? std::max<std::int64_t>(1, all) : block;
  };
  const std::int64_t outer_size = size_of(traits.block_outer, outer);
  const std::int64_t inner_size = size_of(traits.block_inner, inner);
  const std::int64_t outer_stride = scales.dim() > 0 ? scales.stride(0) : 0;
  const std::int64_t inner_stride = scales.dim() > 1 ? scales.stride(1) : 0;
  return row ? ScaleGrid{outer_size, inner_size, outer_stride, inner_stride}
             : ScaleGrid{inner_size, outer_size, inner_stride, outer_stride};
}

void check_tensor(const at::Tensor& x) {
  FLATSHARD_CHECK(
      x.defined() && x.dim() == 2,
      config,
      "float8: expected a tensor [rows, columns], got {}",
      x.defined() ? c10::str(x.sizes()) : "none");
  FLATSHARD_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      config,
      "float8: expected a float32 or bfloat16 tensor, got {}",
      c10::toString(x.scalar_type()));
  FLATSHARD_CHECK(
      x.is_cpu() || x.is_cuda(),
      config,
      "float8: expected a tensor on the CPU or on CUDA, got {}",
      x.device().str());
}

Plane empty_plane(
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const Quantizer& q,
    const PlaneOptions& options) {
  check_options(q, options);
  const bool row = options.axis == Axis::row;
  const bool transposed = !row && options.transpose;
  const std::int64_t outer = row ? rows : columns;
  const std::int64_t inner = row ? columns : rows;
  const RecipeTraits traits = traits_of(q.recipe);
  check_divides(
      q.recipe,
      row ? "rows" : "columns",
      outer,
      traits.rows_share_scales() ? traits.block_outer : 0);
  if (options.multiple == 1) {
    check_divides(
        q.recipe,
        row ? "columns" : "rows",
        inner,
        traits.block_inner);
  }
  const auto data = at::TensorOptions(device).dtype(scalar_type(q.format));
  return {
      transposed ? at::empty({columns, round_up(rows, options.multiple)}, data)
                 : at::empty({rows, columns}, data),
      make_scales(q.recipe, !row && !transposed, outer, inner, device)};
}

PlaneView make_plane(
    const at::Tensor& x,
    const Quantizer& q,
    const PlaneOptions& options) {
  check_tensor(x);
  return plane_over(
      empty_plane(x.size(0), x.size(1), x.device(), q, options),
      x.size(0),
      x.size(1),
      q,
      options);
}

PlaneView plane_over(
    const Plane& out,
    std::int64_t rows,
    std::int64_t columns,
    const Quantizer& q,
    const PlaneOptions& options) {
  const bool transposed = options.axis == Axis::column && options.transpose;
  PlaneView view;
  view.plane = out;
  view.padded_rows = round_up(rows, options.multiple);
  view.row_stride = transposed ? 1 : columns;
  view.column_stride = transposed ? view.padded_rows : 1;
  if (options.scales.defined()) {
    check_given("scales", options.scales, out.scales);
    view.plane.scales = options.scales;
    view.given_scales = true;
  }
  if (options.amax.defined()) {
    check_given("amax", options.amax, out.scales);
    view.amax = options.amax;
  }
  view.grid = scale_grid(q.recipe, options.axis, rows, columns, out.scales);
  return view;
}

}  // namespace flatshard::float8
