#include "flatshard/layout/local_range.h"

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

namespace flatshard {

std::int64_t num_parts(
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes) {
  FLATSHARD_CHECK(
      placements.size() == axis_sizes.size(),
      usage,
      "expected one placement per mesh axis, got {} for {} axes",
      placements.size(),
      axis_sizes.size());
  FLATSHARD_CHECK(
      shards_are_suffix(placements),
      usage,
      "placements {}: expected the sharded axes to be the innermost ones",
      to_string(placements));
  std::int64_t parts = 1;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    FLATSHARD_CHECK(
        axis_sizes[axis] >= 1,
        usage,
        "mesh axis {} has size {}; expected at least 1",
        axis,
        axis_sizes[axis]);
    if (placements[axis].is_shard()) {
      parts = detail::checked_mul(parts, axis_sizes[axis], "mesh");
    }
  }
  return parts;
}

ShardSpan shard_span(
    std::int64_t num_shards,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes,
    std::span<const std::int64_t> coordinate) {
  const std::int64_t parts = num_parts(placements, axis_sizes);
  FLATSHARD_CHECK(
      coordinate.size() == axis_sizes.size(),
      usage,
      "expected one coordinate per mesh axis, got {} for {} axes",
      coordinate.size(),
      axis_sizes.size());
  FLATSHARD_CHECK(
      num_shards >= 1 && num_shards % parts == 0,
      usage,
      "a layout of {} shards cannot be split into {} equal parts; build it "
      "with the product of the sizes of all axes that any buffer is sharded on",
      num_shards,
      parts);
  // Mixed radix with the innermost axis as the most significant digit.
  std::int64_t index = 0;
  for (std::size_t axis = placements.size(); axis-- > 0;) {
    FLATSHARD_CHECK(
        coordinate[axis] >= 0 && coordinate[axis] < axis_sizes[axis],
        usage,
        "coordinate {} on mesh axis {} is out of range, its size is {}",
        coordinate[axis],
        axis,
        axis_sizes[axis]);
    if (placements[axis].is_shard()) {
      index = index * axis_sizes[axis] + coordinate[axis];
    }
  }
  const std::int64_t count = num_shards / parts;
  return {.first = index * count, .count = count};
}

std::int64_t local_numel(
    const FlatLayout& layout,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes) {
  const std::vector<std::int64_t> origin(axis_sizes.size(), 0);
  return layout.shard_numel() *
         shard_span(layout.num_shards(), placements, axis_sizes, origin).count;
}

std::vector<LocalRange> local_ranges(
    const FlatLayout& layout,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes,
    std::span<const std::int64_t> coordinate) {
  const ShardSpan shards =
      shard_span(layout.num_shards(), placements, axis_sizes, coordinate);
  std::vector<LocalRange> ranges;
  for (const Segment& segment : layout.segments()) {
    ranges.push_back(
        {.offset = segment.offset + shards.first * segment.shard_numel,
         .local_offset = shards.count * segment.local_offset,
         .numel = shards.count * segment.shard_numel});
  }
  return ranges;
}

}  // namespace flatshard
