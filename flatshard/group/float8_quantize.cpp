// How FP8 planes are made of main weights.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/group/float8_planes.h"
#include "flatshard/group/float8_scales.h"

namespace flatshard {

namespace {

using float8::Axis;
using float8::Recipe;

std::int64_t round_up_to(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// In one pass; NaN where there is one.
at::Tensor largest_magnitude(const at::Tensor& x, std::int64_t dim) {
  return at::linalg_vector_norm(
      x,
      std::numeric_limits<double>::infinity(),
      dim,
      /*keepdim=*/false,
      at::kFloat);
}

}  // namespace

void Float8Planes::build_scales() {
  const std::int64_t num_parameters = context_.layout->num_tensors();
  std::int64_t numel = 0;
  const auto take = [&](std::int64_t n) {
    return std::exchange(numel, numel + round_up_to(n, 4));
  };
  for (std::int64_t i = 0; i < num_parameters; ++i) {
    const auto [rows, columns] = shape(i);
    ScaleOffsets& at = scale_offsets_.emplace_back();
    switch (format().recipe) {
      case Recipe::tensorwise:
        at.plane[kRows] = at.plane[kColumns] = take(1);
        break;
      case Recipe::rowwise:
        at.plane[kRows] = take(rows);
        at.plane[kColumns] = format().stored_columns ? take(columns) : 0;
        break;
      case Recipe::blockwise: {
        const std::int64_t m = rows / float8::kBlock;
        const std::int64_t n = columns / float8::kBlock;
        at.plane[kRows] = take(m * round_up_to(n, 4));
        at.plane[kColumns] = take(n * round_up_to(m, 4));
        break;
      }
      default:
        return;
    }
  }
  scales_ = at::zeros(
      {numel},
      at::TensorOptions(context_.mesh->device()).dtype(at::kFloat));
}

at::Tensor Float8Planes::scales_of(
    const at::Tensor& all,
    Plane plane,
    std::int64_t i) const {
  const auto [rows, columns] = shape(i);
  const std::int64_t offset = scale_offsets_[i].plane[plane];
  const std::int64_t outer = plane == kRows ? rows : columns;
  const std::int64_t inner = plane == kRows ? columns : rows;
  switch (format().recipe) {
    case Recipe::tensorwise:
      return all[offset];
    case Recipe::rowwise:
      return all.narrow(0, offset, outer);
    default: {
      const std::int64_t n = inner / float8::kBlock;
      return all.as_strided(
          {outer / float8::kBlock, n},
          {round_up_to(n, 4), 1},
          all.storage_offset() + offset);
    }
  }
}

// Of this rank's rows; what others hold stays 0.
void Float8Planes::find_amax(const FlatBuffer& main, const at::Tensor& amax)
    const {
  for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
    const std::int64_t columns = shape(i).columns;
    for (const Piece& piece : main.local_pieces(i)) {
      const std::int64_t begin = piece.tensor_offset / columns;
      const std::int64_t rows = piece.numel / columns;
      if (rows == 0) {
        continue;
      }
      const at::Tensor x = main.local()
                               .narrow(0, piece.local_offset, piece.numel)
                               .view({rows, columns});
      const at::Tensor of_rows = scales_of(amax, kRows, i);
      switch (format().recipe) {
        case Recipe::tensorwise:
          of_rows.copy_(float8::amax_of(x));
          break;
        case Recipe::rowwise:
          of_rows.narrow(0, begin, rows).copy_(largest_magnitude(x, 1));
          if (format().stored_columns) {
            scales_of(amax, kColumns, i).copy_(largest_magnitude(x, 0));
          }
          break;
        default: {
          const std::int64_t n = columns / float8::kBlock;
          const std::int64_t first = begin / float8::kBlock;
          const std::int64_t end =
              round_up_to(begin + rows, float8::kBlock) / float8::kBlock;
          const at::Tensor padded = at::constant_pad_nd(
              largest_magnitude(x.view({rows, n, float8::kBlock}), 2),
              {0,
               0,
               begin - first * float8::kBlock,
               end * float8::kBlock - begin - rows});
          of_rows.narrow(0, first, end - first)
              .copy_(padded.view({end - first, float8::kBlock, n}).amax(1));
        }
      }
    }
  }
}

float8::FlatRun Float8Planes::flat_run(std::int64_t i, const Piece& piece)
    const {
  const std::int64_t columns = shape(i).columns;
  float8::FlatRun run{
      .begin = piece.local_offset,
      .end = piece.local_offset + piece.numel,
      .first = piece.tensor_offset,
      .columns = columns,
      .amax = scale_offsets_[i].plane[kRows]};
  switch (format().recipe) {
    case Recipe::tensorwise:
      break;
    case Recipe::rowwise:
      run.block_rows = 1;
      run.block_columns = columns;
      run.amax_stride = 1;
      break;
    case Recipe::mxfp8: {
      const FlatBuffer& shard = planes_[kRows].shard;
      run.data = shard.local_pieces(i).at(0).local_offset;
      run.scales = shard.local_pieces(context_.layout->num_tensors() + i)
                       .at(0)
                       .local_offset;
      break;
    }
    default:
      run.block_rows = float8::kBlock;
      run.block_columns = float8::kBlock;
      run.amax_stride = round_up_to(columns / float8::kBlock, 4);
  }
  return run;
}

const Float8Outputs* Float8Planes::outputs(const FlatBuffer& main) {
  const bool needs_all_rows =
      format().recipe == Recipe::rowwise && format().stored_columns;
  if (needs_all_rows || (!scales_.defined() && !rests())) {
    return nullptr;
  }
  if (!outputs_) {
    Float8Outputs& outputs = outputs_.emplace();
    outputs.rounding = format().rounding;
    for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
      for (const Piece& piece : main.local_pieces(i)) {
        if (piece.numel > 0) {
          outputs.runs.push_back(flat_run(i, piece));
        }
      }
    }
    std::ranges::sort(outputs.runs, {}, &float8::FlatRun::begin);
    outputs.upload(main.device());
    if (scales_.defined()) {
      // Zero before each update, on its stream.
      outputs.amax = at::empty_like(scales_);
    } else {
      outputs.data = outputs.scales = planes_[kRows].shard.local();
    }
  }
  return &*outputs_;
}

void Float8Planes::refresh(const FlatBuffer& main, bool begun) {
  const at::NoGradGuard no_grad;
  if (scales_.defined()) {
    amax_ = begun ? outputs_->amax : at::zeros_like(scales_);
    if (!begun) {
      find_amax(main, amax_);
    }
    reduce_amax(main.placements());
    scales_.copy_(float8_scales(amax_, format().quantizer()));
    if (format().recipe == Recipe::blockwise) {
      for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
        scales_of(scales_, kColumns, i).copy_(scales_of(scales_, kRows, i).t());
      }
    }
  }
  if (rests()) {
    const bool rows_are_made = begun && !scales_.defined();
    for (const Plane plane : {kRows, kColumns}) {
      if (!stores(plane)) {
        continue;
      }
      if (plane != kRows || !rows_are_made) {
        quantize_stored(main, plane);
      }
      planes_[plane].shard.redistribute(
          context_.strategy.parameter,
          Purpose::gather,
          &planes_[plane].resting);
    }
    amax_.reset();
  }
  if (context_.mesh->device().is_cpu()) {
    for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
      FLATSHARD_CHECK(
          is_finite(main, i),
          usage,
          "parameter {} of {} has weights that are not finite, which no FP8 "
          "scale fits; look at the step that wrote them "
          "(training.on_nonfinite keeps such gradients out of the weights)",
          context_.parameters->at(i).names.front(),
          context_.name);
    }
  }
}

Communicator* Float8Planes::group_of_amax(const Placements& placements) const {
  std::vector<int> axes;
  for (int axis = 0; axis < context_.num_axes(); ++axis) {
    if (context_.mesh->axis(axis).size > 1 && placements[axis].is_shard()) {
      axes.push_back(axis);
    }
  }
  return axes.empty() ? nullptr
                      : &context_.mesh->communicator(axes, Purpose::gather);
}

void Float8Planes::reduce_amax(const Placements& placements) {
  if (Communicator* const group = group_of_amax(placements)) {
    // Magnitudes order as integers do, NaN last.
    group->all_reduce(amax_.view(at::kInt), ReduceOp::max);
  }
}

void Float8Planes::quantize_stored(const FlatBuffer& main, Plane plane) {
  for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
    for (const Piece& piece : main.local_pieces(i)) {
      quantize_piece(main, plane, i, piece, planes_[plane].shard.local(), 0);
    }
  }
}

void Float8Planes::quantize_piece(
    const FlatBuffer& main,
    Plane plane,
    std::int64_t i,
    const Piece& piece,
    const at::Tensor& to,
    std::int64_t to_begin) {
  if (piece.numel == 0) {
    return;
  }
  const std::int64_t columns = shape(i).columns;
  const std::int64_t begin = piece.tensor_offset / columns;
  const std::int64_t rows = piece.numel / columns;
  const at::Tensor x = main.local()
                           .narrow(0, piece.local_offset, piece.numel)
                           .view({rows, columns});
  float8::Quantizer quantizer = format().quantizer();
  float8::PlaneOptions options{
      .axis = plane == kRows ? Axis::row : Axis::column,
      .transpose = false};
  // Where the piece of a tensor of the plane's layout goes.
  const auto place = [&](std::int64_t tensor, at::ScalarType dtype) {
    const Piece at = planes_[plane].shard.local_pieces(tensor).at(0);
    return to.narrow(0, at.local_offset - to_begin, at.numel).view(dtype);
  };
  float8::Plane out{.data = place(i, at::kFloat8_e4m3fn).view({rows, columns})};
  const auto floats = x.options().dtype(at::kFloat);
  switch (quantizer.recipe) {
    case Recipe::tensorwise:
    case Recipe::rowwise:
      // Of scales_, which hold them already.
      options.amax = scales_of(amax_, plane, i);
      if (quantizer.recipe == Recipe::rowwise && plane == kRows) {
        options.amax = options.amax.narrow(0, begin, rows);
      }
      out.scales = at::empty(options.amax.sizes(), floats);
      break;
    case Recipe::mxfp8: {
      const at::Tensor scales =
          place(context_.layout->num_tensors() + i, at::kFloat8_e8m0fnu);
      out.scales = plane == kRows
                       ? scales.view({rows, columns / float8::kMxBlock})
                       : scales.view({rows / float8::kMxBlock, columns}).t();
      break;
    }
    default: {
      // Rows of a block may lie on several ranks: each row has the block's
      // scale.
      quantizer.recipe = Recipe::blockwise_1x128;
      const at::Tensor block =
          at::arange(begin, begin + rows, floats.dtype(at::kLong))
              .div_(float8::kBlock, "floor");
      out.scales =
          at::zeros({columns / float8::kBlock, round_up_to(rows, 4)}, floats)
              .narrow(1, 0, rows)
              .t();
      out.scales.copy_(scales_of(scales_, kRows, i).index_select(0, block));
      options.scales = out.scales;
    }
  }
  float8::quantize_into(out, x, quantizer, options);
}

bool Float8Planes::is_finite(const FlatBuffer& main, std::int64_t i) const {
  if (scales_.defined()) {
    return scales_of(scales_, kRows, i).isfinite().all().item<bool>();
  }
  for (const Piece& piece : main.local_pieces(i)) {
    if (!main.local()
             .narrow(0, piece.local_offset, piece.numel)
             .isfinite()
             .all()
             .item<bool>()) {
      return false;
    }
  }
  return true;
}

}  // namespace flatshard
