#include "flatshard/group/float8_planes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using float8::Axis;
using float8::Recipe;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

at::Tensor
bytes(const at::Tensor& from, std::int64_t offset, std::int64_t numel) {
  return from.narrow(0, offset, numel);
}

bool has_columns_behind(const Float8Format& format) {
  return format.recipe == Recipe::rowwise && !format.stored_columns;
}

}  // namespace

Float8Planes::Float8Planes(const GroupContext& context, Options options)
    : context_(context), options_(options) {
  const std::int64_t block = format().block_of_stored_scales();
  layout_ = block > 0 ? std::make_shared<const FlatLayout>(
                            context.layout->with_scales(block))
                      : context.layout;
  build_parts();
  build_scales();
  for (const Plane plane : {kRows, kColumns}) {
    if (stores(plane)) {
      build_stored(planes_[plane]);
    }
  }
}

void Float8Planes::build_stored(Stored& stored) const {
  const auto& mesh = context_.mesh;
  const Placements& resting = context_.strategy.parameter;
  const Placements& optimizer = context_.strategy.optimizer;
  stored.gathers.resize(1 + parts_.size());
  if (!options_.rests) {
    stored.resting = stored.shard = FlatBuffer::wrap(
        at::empty(
            {FlatBuffer::local_numel(*layout_, *mesh, resting)},
            at::TensorOptions(at::kMeta).dtype(at::kByte)),
        layout_,
        mesh,
        resting);
    return;
  }
  if (options_.peers) {
    stored.peers =
        std::make_unique<PeerBuffer>(layout_, mesh, resting, at::kByte);
    stored.resting = stored.peers->local();
  } else {
    stored.resting = FlatBuffer(layout_, mesh, resting, at::kByte);
    stored.resting.local().zero_();  // padding stays zero
  }
  if (resting == optimizer) {
    stored.shard = stored.resting;
  } else if (layout_->segments().size() == 1) {
    stored.shard = stored.resting.redistribute(optimizer, Purpose::gather);
  } else {
    stored.shard = FlatBuffer(layout_, mesh, optimizer, at::kByte);
    stored.shard.local().zero_();
  }
}

Float8Planes::Shape Float8Planes::shape(std::int64_t i) const {
  const auto& shape = context_.layout->spec(i).shape;
  return {shape[0], shape[1]};
}

void Float8Planes::build_parts() {
  const auto& segments = layout_->segments();
  const std::int64_t num_parameters = context_.layout->num_tensors();
  for (std::int64_t i = 0; i < num_parameters; ++i) {
    const std::int64_t id = context_.layout->spec(i).part;
    if (id == static_cast<std::int64_t>(parts_.size())) {
      parts_.push_back({.first_parameter = i, .extra_offset = extra_nbytes_});
    }
    Part& part = parts_.at(id);
    ++part.num_parameters;
    extra_offsets_.push_back(extra_nbytes_);
    if (has_columns_behind(format())) {
      extra_nbytes_ += round_up(
          shape(i).columns * static_cast<std::int64_t>(sizeof(float)),
          16);
    }
    part.extra_nbytes = extra_nbytes_ - part.extra_offset;
  }
  // With scales each segment of the group is followed by one of theirs.
  const std::int64_t factor =
      segments.size() / context_.layout->segments().size();
  for (Part& part : parts_) {
    std::int64_t first = segments.size();
    std::int64_t end = 0;
    for (std::int64_t i = part.first_parameter;
         i < part.first_parameter + part.num_parameters;
         ++i) {
      const std::int64_t s = context_.layout->tensor_segment(i) * factor;
      first = std::min(first, s);
      end = std::max(end, s + factor);
    }
    part.first_segment = first;
    part.num_segments = end - first;
    part.offset = segments[first].offset;
    part.numel =
        segments[end - 1].offset + segments[end - 1].numel - part.offset;
  }
}

Float8Planes::Part Float8Planes::whole() const {
  return {
      .first_parameter = 0,
      .num_parameters = context_.layout->num_tensors(),
      .first_segment = 0,
      .num_segments = static_cast<std::int64_t>(layout_->segments().size()),
      .offset = 0,
      .numel = layout_->numel(),
      .extra_offset = 0,
      .extra_nbytes = extra_nbytes_};
}

std::int64_t Float8Planes::part_of(std::int64_t parameter) const {
  return context_.layout->spec(parameter).part;
}

std::int64_t Float8Planes::slot_nbytes(Plane plane, int part) const {
  const Part at = part_at(part);
  return at.numel + (stores(plane) ? 0 : at.extra_nbytes);
}

std::int64_t Float8Planes::nbytes() const {
  std::int64_t sum = 0;
  const at::Tensor amax = outputs_ ? outputs_->amax : at::Tensor();
  for (const at::Tensor& tensor : {scales_, amax}) {
    sum += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  }
  if (!rests()) {
    return sum;
  }
  for (const Plane plane : {kRows, kColumns}) {
    const Stored& stored = planes_[plane];
    if (stores(plane)) {
      sum += stored.resting.nbytes();
      const bool is_view =
          stored.shard.local().is_alias_of(stored.resting.local());
      sum += is_view ? 0 : stored.shard.nbytes();
    }
  }
  return sum;
}

void Float8Planes::use_mesh() {
  for (Stored& stored : planes_) {
    for (auto& gather : stored.gathers) {
      gather.reset();
    }
    if (stored.peers != nullptr) {
      stored.peers->use_mesh(*context_.mesh);
    }
  }
}

// -- gathering ----------------------------------------------------------------

const Redistribution& Float8Planes::way_of(Plane plane, int part) {
  std::optional<Redistribution>& way = planes_[plane].gathers.at(1 + part);
  if (!way) {
    const Part at = part_at(part);
    way.emplace(
        std::make_shared<const FlatLayout>(
            layout_->of_segments(at.first_segment, at.num_segments)),
        context_.mesh,
        context_.strategy.parameter,
        context_.whole(),
        Purpose::gather);
  }
  return *way;
}

void Float8Planes::plan_ways() {
  if (scales_.defined()) {
    group_of_amax(context_.strategy.optimizer);
  }
  if (!options_.resident) {
    way_of(kRows, kWhole);
  }
}

void Float8Planes::gather(Plane plane, int part, const at::Tensor& slot) {
  const Redistribution& way = way_of(plane, part);
  const FlatBuffer& resting = planes_[plane].resting;
  const LocalRange& first = resting.local_ranges()[part_at(part).first_segment];
  way.run(bytes(resting.local(), first.local_offset, way.from_numel()), slot);
}

void Float8Planes::gather_made(
    const FlatBuffer& main,
    Plane plane,
    int part,
    const at::Tensor& slot) {
  const at::NoGradGuard no_grad;
  const Redistribution& way = way_of(plane, part);
  const Part at = part_at(part);
  const std::int64_t begin =
      planes_[plane].resting.local_ranges()[at.first_segment].local_offset;
  const at::Tensor made = at::zeros(
      {way.from_numel()},
      at::TensorOptions(context_.mesh->device()).dtype(at::kByte));
  for (std::int64_t i = at.first_parameter;
       i < at.first_parameter + at.num_parameters;
       ++i) {
    for (const Piece& piece : main.local_pieces(i)) {
      quantize_piece(main, plane, i, piece, made, begin);
    }
  }
  way.run(made, slot);
}

void Float8Planes::copy(Plane plane, int part, const at::Tensor& slot) const {
  const Part at = part_at(part);
  planes_[plane].peers->copy_segments(at.first_segment, at.num_segments, slot);
}

void Float8Planes::derive(
    int part,
    const at::Tensor& rows,
    const at::Tensor& columns) const {
  const at::NoGradGuard no_grad;
  const Part at = part_at(part);
  for (std::int64_t i = at.first_parameter;
       i < at.first_parameter + at.num_parameters;
       ++i) {
    const float8::Plane from = view(kRows, i, part, rows);
    const float8::Plane to = view(kColumns, i, part, columns);
    if (!float8::has_power_of_two_scales(format().recipe)) {
      float8::transpose_bytes_into(to.data, from.data);
      continue;
    }
    float8::quantize_into(
        to,
        // Exact: 3 bits, and scales that are powers of two.
        float8::dequantize(from, format().recipe, {.dtype = at::kBFloat16}),
        format().quantizer(),
        {.axis = Axis::column});
  }
}

float8::Plane Float8Planes::view(
    Plane plane,
    std::int64_t i,
    int part,
    const at::Tensor& slot) const {
  const Part at = part_at(part);
  const auto [rows, columns] = shape(i);
  const bool derived = !stores(plane);
  float8::Plane view;
  view.data = bytes(slot, layout_->tensor_offset(i) - at.offset, rows * columns)
                  .view(float8::scalar_type(float8::Format::e4m3))
                  .view(
                      derived ? at::IntArrayRef{columns, rows}
                              : at::IntArrayRef{rows, columns});
  if (scales_.defined() && !(derived && has_columns_behind(format()))) {
    view.scales = scales_of(scales_, plane, i);
    return view;
  }
  if (derived && has_columns_behind(format())) {
    view.scales = bytes(
                      slot,
                      at.numel + extra_offsets_[i] - at.extra_offset,
                      columns * static_cast<std::int64_t>(sizeof(float)))
                      .view(at::kFloat);
    return view;
  }
  const std::int64_t num_parameters = context_.layout->num_tensors();
  const at::Tensor scales =
      bytes(
          slot,
          layout_->tensor_offset(num_parameters + i) - at.offset,
          rows * columns / float8::kMxBlock)
          .view(at::kFloat8_e8m0fnu);
  if (plane == kRows) {
    view.scales = scales.view({rows, columns / float8::kMxBlock});
  } else if (derived) {
    view.scales = scales.view({columns, rows / float8::kMxBlock});
  } else {
    view.scales = scales.view({rows / float8::kMxBlock, columns}).t();
  }
  return view;
}

}  // namespace flatshard
