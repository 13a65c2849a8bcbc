#include "flatshard/group/float8_scales.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>
#include <vector>

#include "flatshard/core/rounding.h"

namespace flatshard {
namespace {

using float8::Axis;

// In one pass. NaN if any value is NaN.
at::Tensor largest_magnitude(const at::Tensor& x, std::int64_t dim) {
  return at::linalg_vector_norm(
      x,
      std::numeric_limits<double>::infinity(),
      dim,
      /*keepdim=*/false,
      at::kFloat);
}

// Finds the amax of blocks of the recipe's size, in rows from `begin` on. A
// block with rows on other ranks gets the amax of this rank's rows.
void find_amax_of_blocks(
    const at::Tensor& x,
    std::int64_t begin,
    const float8::RecipeTraits& traits,
    const at::Tensor& out) {
  const std::int64_t rows = x.size(0);
  const std::int64_t n = x.size(1) / traits.block_inner;
  const std::int64_t block = traits.block_outer;
  const std::int64_t first = begin / block;
  const std::int64_t end = round_up(begin + rows, block) / block;
  const at::Tensor padded = at::constant_pad_nd(
      largest_magnitude(x.view({rows, n, traits.block_inner}), 2),
      {0, 0, begin - first * block, end * block - begin - rows});
  out.narrow(0, first, end - first)
      .copy_(padded.view({end - first, block, n}).amax(1));
}

}  // namespace

at::Tensor float8_scales(const at::Tensor& amax, const float8::Quantizer& q) {
  const float8::FormatTraits format = float8::traits_of(q.format);
  at::Tensor scales;
  if (!float8::has_power_of_two_scales(q.recipe)) {
    const at::Tensor quantize = at::full({}, format.largest, amax.options())
                                    .div(amax.clamp_min(float8::kLeastAmax));
    scales = at::full({}, 1.0F, amax.options()).div(quantize);
  } else {
    // The exponent field, and one more where the mantissa is above the
    // format's largest.
    const at::Tensor bits = amax.view(at::kInt);
    const auto largest_mantissa =
        static_cast<std::int64_t>(float8::bits_of(format.largest) & 0x7fffffU);
    at::Tensor code = bits.bitwise_right_shift(23) - format.largest_exponent;
    if (q.rounding == float8::Rounding::up) {
      code = code + bits.bitwise_and(0x7fffff).gt(largest_mantissa);
    }
    code = code.clamp_min(0);
    // 2^-127 is subnormal.
    scales = at::where(
                 code.eq(0).logical_or(bits.lt(0x00800000)),
                 at::full_like(code, 0x00400000),
                 code.bitwise_left_shift(23))
                 .view(at::kFloat);
  }
  return scales.masked_fill(
      amax.isfinite().logical_not(),
      std::numeric_limits<float>::quiet_NaN());
}

Float8Scales::Float8Scales(const GroupContext& context)
    : context_(context),
      quantizer_(context.options.float8->quantizer()),
      traits_(float8::traits_of(quantizer_.recipe)),
      stored_columns_(context.options.float8->stored_columns),
      transposes_(context.options.float8->transposes_scales()) {
  scales_ = at::zeros(
      {context.plan.shape.float8->num_scales},
      at::TensorOptions(context.mesh->device()).dtype(at::kFloat));
}

at::Tensor Float8Scales::view(const at::Tensor& all, Axis axis, std::int64_t i)
    const {
  const auto& shape = context_.plan.layout->spec(i).shape;
  const std::int64_t offset = offsets(i)[axis == Axis::row ? 0 : 1];
  const std::int64_t outer = axis == Axis::row ? shape[0] : shape[1];
  const std::int64_t inner = axis == Axis::row ? shape[1] : shape[0];
  if (traits_.has_one_scale()) {
    return all[offset];
  }
  if (traits_.block_inner == 0) {
    return all.narrow(0, offset, outer / traits_.block_outer);
  }
  const std::int64_t n = inner / traits_.block_inner;
  return all.as_strided(
      {outer / traits_.block_outer, n},
      {round_up(n, kScaleMultiple), 1},
      all.storage_offset() + offset);
}

bool Float8Scales::is_finite(std::int64_t i) const {
  return of(Axis::row, i).isfinite().all().item<bool>();
}

// Only this rank's rows count. The amax of other ranks' rows stays 0.
void Float8Scales::find_amax(const FlatBuffer& main) const {
  for (std::int64_t i = 0; i < context_.plan.layout->num_tensors(); ++i) {
    const std::int64_t columns = context_.plan.layout->spec(i).shape[1];
    for (const Piece& piece : main.local_pieces(i)) {
      const std::int64_t begin = piece.tensor_offset / columns;
      const std::int64_t rows = piece.numel / columns;
      if (rows == 0) {
        continue;
      }
      const at::Tensor x = main.local()
                               .narrow(0, piece.local_offset, piece.numel)
                               .view({rows, columns});
      const at::Tensor of_rows = amax(Axis::row, i);
      if (traits_.has_one_scale()) {
        of_rows.copy_(float8::amax_of(x));
      } else if (traits_.block_inner == 0) {
        of_rows.narrow(0, begin, rows).copy_(largest_magnitude(x, 1));
      } else {
        find_amax_of_blocks(x, begin, traits_, of_rows);
      }
      if (stored_columns_) {
        amax(Axis::column, i).copy_(largest_magnitude(x, 0));
      }
    }
  }
}

void Float8Scales::update(const FlatBuffer& main, at::Tensor amax) {
  const bool found = amax.defined();
  amax_ = found ? std::move(amax) : at::zeros_like(scales_);
  if (!found) {
    find_amax(main);
    // A CPU's at::amax may return a NaN with a sign, the least of int32.
    amax_.abs_();
  }
  if (Communicator* const group = group_of_amax(main.placements())) {
    // Magnitudes order as integers do, NaN last.
    group->all_reduce(amax_.view(at::kInt), ReduceOp::max);
  }
  scales_.copy_(float8_scales(amax_, quantizer_));
  if (transposes_) {
    for (std::int64_t i = 0; i < context_.plan.layout->num_tensors(); ++i) {
      of(Axis::column, i).copy_(of(Axis::row, i).t());
    }
  }
}

Communicator* Float8Scales::group_of_amax(const Placements& of_main) const {
  std::vector<int> axes;
  for (int axis = 0; axis < context_.num_axes(); ++axis) {
    if (context_.mesh->axis(axis).size > 1 && of_main[axis].is_shard()) {
      axes.push_back(axis);
    }
  }
  return axes.empty() ? nullptr
                      : &context_.mesh->communicator(axes, Purpose::gather);
}

at::Tensor Float8Scales::empty_amax() const {
  return at::empty_like(scales_);
}

void Float8Scales::place_amax(std::int64_t i, float8::FlatRun& run) const {
  run.amax = offsets(i)[0];
  if (traits_.has_one_scale()) {
    return;
  }
  run.block_rows = traits_.block_outer;
  run.block_columns =
      traits_.block_inner == 0 ? run.columns : traits_.block_inner;
  run.amax_stride =
      traits_.block_inner == 0
          ? 1
          : round_up(run.columns / traits_.block_inner, kScaleMultiple);
}

}  // namespace flatshard
