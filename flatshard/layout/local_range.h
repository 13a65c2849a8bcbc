#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/placement.h"

namespace flatshard {

/// One rank's part of one segment.
struct LocalRange {
  std::int64_t offset = 0;        ///< first element, in the flat space
  std::int64_t local_offset = 0;  ///< first element, in the rank's buffer
  std::int64_t numel = 0;
  bool operator==(const LocalRange&) const = default;
};

// `axis_sizes` and `coordinate` have one entry per placement, outermost axis
// first. The innermost axis is split first. Over sharded axes (outer, inner)
// the shard index is inner * outer_size + outer. So an all-gather over only the
// outer axis gives each rank its contiguous inner shard. Replicated and partial
// axes have the full range. All functions throw Error{usage} for lists that do
// not fit together, for sharded axes that are not the innermost ones, and for
// indivisible shards.

/// The number of equal parts of a buffer with these placements.
std::int64_t num_parts(
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes);

/// Returns the shards of the rank at `coordinate`: adjacent shards, one of
/// `num_parts` equal groups.
ShardSpan shard_span(
    std::int64_t num_shards,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes,
    std::span<const std::int64_t> coordinate);

/// Returns the number of elements of the rank's buffer, the same for every
/// rank.
std::int64_t local_numel(
    const FlatLayout& layout,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes);

/// Returns one range per segment, in the order of `layout.segments()`. The
/// rank's buffer is their concatenation.
std::vector<LocalRange> local_ranges(
    const FlatLayout& layout,
    const Placements& placements,
    std::span<const std::int64_t> axis_sizes,
    std::span<const std::int64_t> coordinate);

}  // namespace flatshard
