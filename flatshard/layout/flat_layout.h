#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "flatshard/layout/granularity.h"

namespace flatshard {

/// A tensor to be placed in a flat space.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  Granularity granularity = {};
  /// Tensors of different parts share no segment, so that each part can be
  /// all-gathered separately.
  std::int64_t part = 0;
};

/// The default alignment of a layout, in elements: every tensor and every shard
/// starts at a multiple of it. 16 keeps all-gathered bf16 tensors on 32 bytes
/// and FP8 ones on 16.
inline constexpr std::int64_t kLayoutAlignment = 16;

/// A part of the flat space that is split into equal shards: shard s is
/// [offset + s * shard_numel, offset + (s + 1) * shard_numel).
struct Segment {
  /// Contains tensors of granularity `tensor`; none of them is split.
  bool whole_tensors = false;
  /// Elements; shard boundaries are multiples of it counted from `offset`.
  std::int64_t granule = 0;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int64_t shard_numel = 0;
  /// The start of this segment's part in the local buffer of one shard. The
  /// buffer concatenates that shard's parts of all segments.
  std::int64_t local_offset = 0;
};

/// The elements [offset, offset + numel) of the flat space.
struct FlatRange {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  bool operator==(const FlatRange&) const = default;
};

/// `count` adjacent shards: a rank's part if its buffer is sharded on fewer
/// axes than the layout was split for.
struct ShardSpan {
  std::int64_t first = 0;
  std::int64_t count = 1;
  bool operator==(const ShardSpan&) const = default;
};

/// A run of a tensor inside the local buffer of some shards.
struct Piece {
  std::int64_t tensor_offset = 0;  ///< first element, counted in the tensor
  std::int64_t local_offset = 0;   ///< first element, counted in the buffer
  std::int64_t numel = 0;
  bool operator==(const Piece&) const = default;
};

/// The place of each tensor of a group in one flat index space, each shard's
/// range, and the amount of padding. Integers only, immutable.
///
/// Every tensor is contiguous in the flat space. It starts at a multiple of its
/// granule g from the segment's start, where g = lcm(elements of one granule,
/// alignment). A segment's shard is a multiple of the largest granule in it,
/// and this is a multiple of all others. So no boundary splits a granule.
/// - element(n): one segment per n, in practice one for the entire layout.
/// - row, block(rows): one segment per distinct granule; padding is at most
///   sum(granules) * num_shards / numel where the widths are multiples of the
///   alignment. (A common segment would force its shard to the least common
///   multiple.) Tensors of a finer granule move into the segment of a coarser
///   one that is a multiple of it where that makes no shard longer: they fill
///   the room that the coarse rows leave.
/// - chunk: one segment per tensor, with only its granules. Its start is
///   aligned, the shards that split it need not be. If not, a segment without
///   tensors follows and brings the next one and its shards to an alignment.
/// - tensor: one segment; tensors go, largest first, to the shard with the
///   fewest elements so far.
/// A layout has at least one segment. Segments are in the order of their first
/// tensors. Inside a segment, coarse granules are first, otherwise the tensors
/// are in the given order.
class FlatLayout {
 public:
  /// @param specs  unique non-empty names, no negative sizes. Scalars, empty
  ///   tensors and more shards than granules are normal; a shard may be empty.
  /// @throws Error{usage} for a bad spec.
  static FlatLayout build(
      std::vector<TensorSpec> specs,
      std::int64_t num_shards,
      std::int64_t alignment = kLayoutAlignment);

  /// Returns this layout for one-byte elements with a one-byte scale for each
  /// `block` of them, as MXFP8 has for 32: each segment is followed by a
  /// segment of its scales, split at the same places. Tensor i keeps its
  /// number. Its scales are tensor num_tensors() + i.
  /// @throws Error{config} where a boundary, or a tensor, is not a multiple
  ///   of `block`.
  FlatLayout with_scales(std::int64_t block) const;
  /// Returns the layout of only some adjacent segments, without the tensors:
  /// for a Redistribution of them.
  FlatLayout of_segments(std::int64_t first, std::int64_t count) const;

  /// Returns the number of elements of the flat space, padding included; equals
  /// num_shards() * shard_numel().
  std::int64_t numel() const { return numel_; }
  std::int64_t num_shards() const { return num_shards_; }
  /// Returns the number of elements of one shard over all segments.
  std::int64_t shard_numel() const { return numel_ / num_shards_; }

  std::int64_t num_tensors() const {
    return static_cast<std::int64_t>(specs_.size());
  }
  const TensorSpec& spec(std::int64_t i) const;
  /// Returns the first element of tensor `i` in the flat space.
  std::int64_t tensor_offset(std::int64_t i) const;
  std::int64_t tensor_numel(std::int64_t i) const;
  /// Index into segments().
  std::int64_t tensor_segment(std::int64_t i) const;
  /// Returns the tensor's index, or nothing.
  std::optional<std::int64_t> find(std::string_view name) const;

  const std::vector<Segment>& segments() const { return segments_; }

  /// numel() less the elements of all tensors.
  std::int64_t padding_numel() const { return numel_ - data_numel_; }
  /// padding_numel() over the elements of all tensors; 0 when there are none.
  double padding_ratio() const;
  /// Returns all elements that belong to no tensor, in flat order.
  std::vector<FlatRange> padding_ranges() const;

  /// The part of tensor `i` that is in shard `shard`: one piece or none,
  /// since a tensor is contiguous and is in one segment.
  std::vector<Piece> shard_pieces(std::int64_t i, std::int64_t shard) const {
    return shard_pieces(i, ShardSpan{shard, 1});
  }
  /// Returns the same for the local buffer of several adjacent shards. For each
  /// segment the buffer contains the shards' parts in order.
  std::vector<Piece> shard_pieces(std::int64_t i, ShardSpan shards) const;

  /// Returns a readable memory map: segments, tensors and padding with their
  /// flat ranges, then the contents of each shard (the first 16 shards).
  std::string describe() const;

 private:
  struct TensorPlace {
    std::int64_t offset = 0;
    std::int64_t numel = 0;
    std::int64_t granule = 1;
    std::int64_t segment = 0;
  };
  /// The tensors of a segment in packing order.
  struct Bundle {
    bool whole_tensors = false;
    bool one_chunked = false;  ///< one tensor of granularity `chunk`
    std::int64_t granule = 1;
    std::int64_t part = 0;
    std::vector<std::int64_t> tensors;
  };

  FlatLayout() = default;

  const TensorPlace& place(std::int64_t i) const;
  void pack(std::int64_t num_shards, std::int64_t alignment);
  std::vector<Bundle> bundles(std::int64_t alignment) const;
  void merge(std::vector<Bundle>& bundles);
  void add_segment(const Bundle& bundle, std::int64_t shard_numel);
  std::int64_t pack_bundle(const Bundle& bundle);
  std::int64_t pack_in_order(const Bundle& bundle);
  std::int64_t pack_whole(const Bundle& bundle);
  std::vector<std::int64_t> tensors_by_offset() const;

  std::int64_t num_shards_ = 1;
  std::int64_t numel_ = 0;
  std::int64_t data_numel_ = 0;
  std::vector<TensorSpec> specs_;
  std::vector<TensorPlace> places_;
  std::vector<Segment> segments_;
  std::unordered_map<std::string, std::int64_t> index_;
};

}  // namespace flatshard
