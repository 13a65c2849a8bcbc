#include "flatshard/group/float8_codec.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/float8/requantize.h"

namespace flatshard {
namespace {

using float8::Axis;

Axis axis_of(const Plane& plane) {
  return plane.in_forward ? Axis::row : Axis::column;
}

float8::Plane values(PlaneView view) {
  return {std::move(view.data), std::move(view.scales)};
}

}  // namespace

Float8Codec::Float8Codec(const GroupContext& context)
    : context_(context),
      traits_(float8::traits_of(context.options.float8->recipe)) {
  if (!traits_.scales_are_sharded) {
    scales_.emplace(context);
  }
}

std::int64_t Float8Codec::nbytes() const {
  const at::Tensor amax = writer_ ? writer_->amax : at::Tensor();
  return (scales_ ? scales_->nbytes() : 0) +
         (amax.defined() ? static_cast<std::int64_t>(amax.nbytes()) : 0);
}

// -- encoding -----------------------------------------------------------------

void Float8Codec::plan() {
  if (scales_) {
    scales_->plan();
  }
}

void Float8Codec::begin(const FlatBuffer& main, const PlaneWriter* encoded) {
  const at::NoGradGuard no_grad;
  rows_are_made_ = encoded != nullptr && !scales_;
  if (scales_) {
    scales_->update(main, encoded != nullptr ? encoded->amax : at::Tensor());
  }
}

void Float8Codec::encode(
    const Plane& plane,
    PartId part,
    const FlatBuffer& main,
    const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  if (rows_are_made_ && axis_of(plane) == Axis::row) {
    return;
  }
  if (!plane.resting.defined()) {
    to.zero_();  // padding
  }
  const PlanePart& at = plane.part(part);
  const std::int64_t begin =
      plane.shard.local_ranges()[at.first_segment].local_offset;
  for (std::int64_t i = at.first_parameter;
       i < at.first_parameter + at.num_parameters;
       ++i) {
    for (const Piece& piece : main.local_pieces(i)) {
      if (piece.numel > 0) {
        encode_piece(plane, main, i, piece, to, begin);
      }
    }
  }
}

void Float8Codec::encode_piece(
    const Plane& plane,
    const FlatBuffer& main,
    std::int64_t i,
    const Piece& piece,
    const at::Tensor& to,
    std::int64_t to_begin) const {
  const Axis axis = axis_of(plane);
  const std::int64_t columns = shape(i)[1];
  const std::int64_t begin = piece.tensor_offset / columns;
  const std::int64_t rows = piece.numel / columns;
  const at::Tensor x = main.local()
                           .narrow(0, piece.local_offset, piece.numel)
                           .view({rows, columns});
  float8::Quantizer quantizer = format().quantizer();
  float8::PlaneOptions options{.axis = axis, .transpose = false};
  // Returns the destination of a tensor in the plane's layout.
  const auto place = [&](std::int64_t tensor, at::ScalarType dtype) {
    const Piece at = plane.shard.local_pieces(tensor).at(0);
    return to.narrow(0, at.local_offset - to_begin, at.numel).view(dtype);
  };
  float8::Plane out{
      .data = place(i, float8::scalar_type(quantizer.format))
                  .view({rows, columns})};
  const auto floats = x.options().dtype(at::kFloat);
  if (traits_.scales_are_sharded) {
    const std::int64_t block = traits_.block_inner;
    const at::Tensor scales =
        place(context_.plan.layout->num_tensors() + i, at::kFloat8_e8m0fnu);
    out.scales = axis == Axis::row ? scales.view({rows, columns / block})
                                   : scales.view({rows / block, columns}).t();
  } else if (traits_.block_inner == 0) {
    // scales_ already has these values.
    options.amax = scales_->amax(axis, i);
    if (!traits_.has_one_scale() && axis == Axis::row) {
      options.amax = options.amax.narrow(0, begin, rows);
    }
    out.scales = at::empty(options.amax.sizes(), floats);
  } else {
    // Rows of a block may be on several ranks: each row has the block's scale.
    quantizer.recipe = traits_.activations;
    const at::Tensor block =
        at::arange(begin, begin + rows, floats.dtype(at::kLong))
            .div_(traits_.block_outer, "floor");
    out.scales =
        at::zeros(
            {columns / traits_.block_inner, round_up(rows, kScaleMultiple)},
            floats)
            .narrow(1, 0, rows)
            .t();
    out.scales.copy_(scales_->of(Axis::row, i).index_select(0, block));
    options.scales = out.scales;
  }
  float8::quantize_into(out, x, quantizer, options);
}

void Float8Codec::end(const FlatBuffer& main, bool all_encoded) {
  if (scales_ && all_encoded) {
    scales_->forget_amax();
  }
  if (!context_.mesh->device().is_cpu()) {
    return;
  }
  for (std::int64_t i = 0; i < context_.plan.layout->num_tensors(); ++i) {
    FLATSHARD_CHECK(
        is_finite(main, i),
        usage,
        "parameter {} of {} has weights that are not finite, and no FP8 scale "
        "fits them; check the step that wrote them (training.on_nonfinite "
        "keeps such gradients out of the weights)",
        context_.parameters->at(i).names.front(),
        context_.name);
  }
}

bool Float8Codec::is_finite(const FlatBuffer& main, std::int64_t i) const {
  if (scales_) {
    return scales_->is_finite(i);
  }
  const auto pieces = main.local_pieces(i);
  return std::ranges::all_of(pieces, [&](const Piece& piece) {
    return main.local()
        .narrow(0, piece.local_offset, piece.numel)
        .isfinite()
        .all()
        .item<bool>();
  });
}

float8::FlatRun Float8Codec::flat_run(
    const Plane& rows,
    std::int64_t i,
    const Piece& piece) const {
  float8::FlatRun run{
      .begin = piece.local_offset,
      .end = piece.local_offset + piece.numel,
      .first = piece.tensor_offset,
      .columns = shape(i)[1]};
  if (scales_) {
    scales_->place_amax(i, run);
  } else {
    run.data = rows.shard.local_pieces(i).at(0).local_offset;
    run.scales =
        rows.shard.local_pieces(context_.plan.layout->num_tensors() + i)
            .at(0)
            .local_offset;
  }
  return run;
}

const PlaneWriter* Float8Codec::writer(
    const FlatBuffer& main,
    const std::vector<Plane>& planes) {
  const auto rows = std::ranges::find_if(planes, [](const Plane& plane) {
    return plane.stored() && axis_of(plane) == Axis::row;
  });
  const bool needs_all_rows = scales_ && format().stored_columns;
  if (needs_all_rows || (!scales_ && !rows->resting.defined())) {
    return nullptr;
  }
  if (!writer_) {
    PlaneWriter& writer = writer_.emplace();
    writer.rounding = format().rounding;
    for (std::int64_t i = 0; i < context_.plan.layout->num_tensors(); ++i) {
      for (const Piece& piece : main.local_pieces(i)) {
        if (piece.numel > 0) {
          writer.runs.push_back(flat_run(*rows, i, piece));
        }
      }
    }
    std::ranges::sort(writer.runs, {}, &float8::FlatRun::begin);
    writer.upload(main.device());
    if (scales_) {
      // Zero before each update, on its stream.
      writer.amax = scales_->empty_amax();
    } else {
      writer.data = writer.scales = rows->shard.local();
    }
  }
  return &*writer_;
}

// -- reading ------------------------------------------------------------------

void Float8Codec::derive(
    const Plane& plane,
    PartId part,
    const Plane& source,
    const at::Tensor& from,
    const at::Tensor& to) const {
  const at::NoGradGuard no_grad;
  const PlanePart& at = plane.part(part);
  for (std::int64_t i = at.first_parameter;
       i < at.first_parameter + at.num_parameters;
       ++i) {
    const float8::Plane rows = values(view(source, part, i, from));
    const float8::Plane columns = values(view(plane, part, i, to));
    if (!float8::has_power_of_two_scales(format().recipe)) {
      float8::transpose_bytes_into(columns.data, rows.data);
      continue;
    }
    float8::requantize_into(columns, rows, format().quantizer());
  }
}

PlaneView Float8Codec::view(
    const Plane& plane,
    PartId part,
    std::int64_t i,
    const at::Tensor& slot) const {
  const PlanePart& at = plane.part(part);
  const auto [rows, columns] = shape(i);
  const bool derived = plane.source != kStored;
  PlaneView view;
  view.data = slot.narrow(
                      0,
                      context_.plan.plane_layout->tensor_offset(i) - at.offset,
                      rows * columns)
                  .view(float8::scalar_type(float8::Format::e4m3))
                  .view(
                      derived ? at::IntArrayRef{columns, rows}
                              : at::IntArrayRef{rows, columns});
  if (derived && context_.plan.shape.float8->scales_behind_columns) {
    view.scales = slot.narrow(
                          0,
                          at.layout->numel() + context_.plan.nbytes_behind(
                                                   at.first_parameter,
                                                   i - at.first_parameter),
                          columns * static_cast<std::int64_t>(sizeof(float)))
                      .view(at::kFloat);
  } else if (scales_) {
    view.scales = scales_->of(axis_of(plane), i);
  } else {
    view.scales = view_sharded_scales(plane, at, i, slot);
  }
  return view;
}

float8::WeightOperand Float8Codec::operand(const Plane& plane, PlaneView view)
    const {
  if (plane.stored() && !plane.in_forward) {
    // The exchange keeps the order of the rows, while matmuls read the
    // transpose.
    view.data = float8::transpose_bytes(view.data);
    view.scales = view.scales.contiguous();
  }
  return {
      .operand = {values(std::move(view)), format().recipe},
      .emulate = format().emulate};
}

at::Tensor Float8Codec::view_sharded_scales(
    const Plane& plane,
    const PlanePart& part,
    std::int64_t i,
    const at::Tensor& slot) const {
  const auto [rows, columns] = shape(i);
  const std::int64_t block = traits_.block_inner;
  const at::Tensor scales =
      slot.narrow(
              0,
              context_.plan.plane_layout->tensor_offset(
                  context_.plan.layout->num_tensors() + i) -
                  part.offset,
              rows * columns / block)
          .view(at::kFloat8_e8m0fnu);
  if (axis_of(plane) == Axis::row) {
    return scales.view({rows, columns / block});
  }
  return plane.source != kStored ? scales.view({columns, rows / block})
                                 : scales.view({rows / block, columns}).t();
}

}  // namespace flatshard
