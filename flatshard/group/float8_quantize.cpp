// How FP8 planes are made of main weights.
#include <ATen/ATen.h>

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

void Float8Planes::refresh(const FlatBuffer& main) {
  const at::NoGradGuard no_grad;
  if (scales_.defined()) {
    const at::Tensor amax = at::zeros_like(scales_);
    find_amax(main, amax);
    std::vector<int> axes;
    for (int axis = 0; axis < context_.num_axes(); ++axis) {
      if (context_.mesh->axis(axis).size > 1 &&
          main.placements()[axis].is_shard()) {
        axes.push_back(axis);
      }
    }
    if (!axes.empty()) {
      // Magnitudes order as integers do, NaN last.
      context_.mesh->communicator(axes, Purpose::gather)
          .all_reduce(amax.view(at::kInt), ReduceOp::max);
    }
    scales_.copy_(float8_scales(amax, format().quantizer()));
    if (format().recipe == Recipe::blockwise) {
      for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
        scales_of(scales_, kColumns, i).copy_(scales_of(scales_, kRows, i).t());
      }
    }
    quantize_with(main, amax);
  } else {
    quantize_with(main, {});
  }
  for (const Plane plane : {kRows, kColumns}) {
    const Stored& stored = planes_[plane];
    if (stores(plane)) {
      stored.shard.redistribute(
          context_.strategy.parameter,
          Purpose::gather,
          &stored.resting);
    }
  }
  if (context_.mesh->device().is_cpu()) {
    for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
      FLATSHARD_CHECK(
          is_finite(i),
          usage,
          "parameter {} of {} has weights that are not finite, which no FP8 "
          "scale fits; look at the step that wrote them ([diagnostics] "
          "nonfinite stops before such a step)",
          context_.layout->spec(i).name,
          context_.name);
    }
  }
}

void Float8Planes::quantize_with(
    const FlatBuffer& main,
    const at::Tensor& amax) {
  for (const Plane plane : {kRows, kColumns}) {
    if (!stores(plane)) {
      continue;
    }
    for (std::int64_t i = 0; i < context_.layout->num_tensors(); ++i) {
      for (const Piece& piece : main.local_pieces(i)) {
        if (piece.numel > 0) {
          quantize_piece(main, amax, plane, i, piece);
        }
      }
    }
  }
}

void Float8Planes::quantize_piece(
    const FlatBuffer& main,
    const at::Tensor& amax,
    Plane plane,
    std::int64_t i,
    const Piece& piece) {
  const FlatBuffer& shard = planes_[plane].shard;
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
  if (quantizer.recipe == Recipe::blockwise) {
    // Rows of a block may lie on several ranks: each row has the block's scale.
    quantizer.recipe = Recipe::blockwise_1x128;
    const at::Tensor block =
        at::arange(begin, begin + rows, x.options().dtype(at::kLong))
            .div_(float8::kBlock, "floor");
    options.scales = at::zeros(
                         {columns / float8::kBlock, round_up_to(rows, 4)},
                         x.options().dtype(at::kFloat))
                         .narrow(1, 0, rows)
                         .t();
    options.scales.copy_(scales_of(scales_, kRows, i).index_select(0, block));
  } else if (amax.defined()) {
    options.amax = scales_of(amax, plane, i);
    if (quantizer.recipe == Recipe::rowwise && plane == kRows) {
      options.amax = options.amax.narrow(0, begin, rows);
    }
  }
  const float8::Plane made = float8::quantize(x, quantizer, options);
  const auto put = [&](std::int64_t tensor, const at::Tensor& values) {
    const Piece at = shard.local_pieces(tensor).at(0);
    shard.local()
        .narrow(0, at.local_offset, at.numel)
        .copy_(values.view(at::kByte).view({-1}));
  };
  put(i, made.data);
  if (!amax.defined()) {
    put(context_.layout->num_tensors() + i,
        plane == kRows ? made.scales : made.scales.t());
  }
}

bool Float8Planes::is_finite(std::int64_t i) const {
  if (scales_.defined()) {
    return scales_of(scales_, kRows, i).isfinite().all().item<bool>();
  }
  const FlatBuffer& shard = planes_[kRows].shard;
  for (const Piece& piece :
       shard.local_pieces(context_.layout->num_tensors() + i)) {
    if (shard.local()
            .narrow(0, piece.local_offset, piece.numel)
            .eq(float8::kNanE8m0)
            .any()
            .item<bool>()) {
      return false;
    }
  }
  return true;
}

}  // namespace flatshard
