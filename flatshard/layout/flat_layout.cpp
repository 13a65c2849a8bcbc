#include "flatshard/layout/flat_layout.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

namespace flatshard {
namespace {

void check_options(std::int64_t num_shards, std::int64_t alignment) {
  FLATSHARD_CHECK(
      num_shards >= 1,
      usage,
      "num_shards: expected at least 1, got {}",
      num_shards);
  FLATSHARD_CHECK(
      alignment >= 1,
      config,
      "alignment: expected at least 1 element, got {}",
      alignment);
}

void check_spec(const TensorSpec& spec) {
  FLATSHARD_CHECK(
      !spec.name.empty(),
      usage,
      "a tensor of a layout has an empty name");
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    FLATSHARD_CHECK(
        spec.shape[dim] >= 0,
        usage,
        "tensor '{}': dim {} has size {}; expected at least 0",
        spec.name,
        dim,
        spec.shape[dim]);
  }
}

/// The start of the tensor is a multiple of this, and so are the places where a
/// boundary may split it. Chunks start where their segment does.
std::int64_t aligned_granule(
    const TensorSpec& spec,
    std::int64_t numel,
    std::int64_t alignment) {
  if (numel == 0 || spec.granularity.kind() == Granularity::Kind::tensor) {
    return alignment;
  }
  if (spec.granularity.kind() == Granularity::Kind::chunk) {
    return spec.granularity.granule_numel(spec.shape);
  }
  return detail::checked_lcm(
      spec.granularity.granule_numel(spec.shape),
      alignment,
      spec.name);
}

}  // namespace

FlatLayout FlatLayout::build(
    std::vector<TensorSpec> specs,
    std::int64_t num_shards,
    std::int64_t alignment) {
  check_options(num_shards, alignment);
  FlatLayout layout;
  layout.specs_ = std::move(specs);
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const TensorSpec& spec = layout.specs_[i];
    check_spec(spec);
    const bool is_new = layout.index_.emplace(spec.name, i).second;
    FLATSHARD_CHECK(
        is_new,
        usage,
        "two tensors of a layout are named '{}'",
        spec.name);
    const std::int64_t numel = detail::numel_of(spec.shape, spec.name);
    layout.places_.push_back(
        {.numel = numel, .granule = aligned_granule(spec, numel, alignment)});
    layout.data_numel_ =
        detail::checked_add(layout.data_numel_, numel, spec.name);
  }
  layout.pack(num_shards, alignment);
  return layout;
}

const FlatLayout::TensorPlace& FlatLayout::place(std::int64_t i) const {
  FLATSHARD_CHECK(
      i >= 0 && i < num_tensors(),
      usage,
      "tensor index {} is out of range, the layout has {} tensors",
      i,
      num_tensors());
  return places_[i];
}

const TensorSpec& FlatLayout::spec(std::int64_t i) const {
  place(i);
  return specs_[i];
}

std::int64_t FlatLayout::tensor_offset(std::int64_t i) const {
  return place(i).offset;
}

std::int64_t FlatLayout::tensor_numel(std::int64_t i) const {
  return place(i).numel;
}

std::int64_t FlatLayout::tensor_segment(std::int64_t i) const {
  return place(i).segment;
}

std::optional<std::int64_t> FlatLayout::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? std::nullopt : std::optional(it->second);
}

double FlatLayout::padding_ratio() const {
  return data_numel_ == 0 ? 0.0
                          : static_cast<double>(padding_numel()) /
                                static_cast<double>(data_numel_);
}

std::vector<std::int64_t> FlatLayout::tensors_by_offset() const {
  std::vector<std::int64_t> order(specs_.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<std::int64_t>(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::pair(places_[a].offset, places_[a].numel) <
           std::pair(places_[b].offset, places_[b].numel);
  });
  return order;
}

std::vector<FlatRange> FlatLayout::padding_ranges() const {
  std::vector<FlatRange> ranges;
  std::int64_t end = 0;
  for (const std::int64_t i : tensors_by_offset()) {
    if (places_[i].offset > end) {
      ranges.push_back({end, places_[i].offset - end});
    }
    end = places_[i].offset + places_[i].numel;
  }
  if (numel_ > end) {
    ranges.push_back({end, numel_ - end});
  }
  return ranges;
}

std::vector<Piece> FlatLayout::shard_pieces(std::int64_t i, ShardSpan shards)
    const {
  const TensorPlace& tensor = place(i);
  FLATSHARD_CHECK(
      shards.first >= 0 && shards.count >= 1 &&
          shards.first <= num_shards_ - shards.count,
      usage,
      "shards [{}, {}) are out of range, the layout has {} shards",
      shards.first,
      shards.first + shards.count,
      num_shards_);
  const Segment& segment = segments_[tensor.segment];
  const std::int64_t part_begin =
      segment.offset + shards.first * segment.shard_numel;
  const std::int64_t part_end = part_begin + shards.count * segment.shard_numel;
  const std::int64_t begin = std::max(tensor.offset, part_begin);
  const std::int64_t end = std::min(tensor.offset + tensor.numel, part_end);
  if (begin >= end) {
    return {};
  }
  return {Piece{
      .tensor_offset = begin - tensor.offset,
      .local_offset = shards.count * segment.local_offset + begin - part_begin,
      .numel = end - begin}};
}

}  // namespace flatshard
