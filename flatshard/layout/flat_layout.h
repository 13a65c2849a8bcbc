#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "flatshard/layout/granularity.h"

namespace flatshard {

/// One tensor that wants a place in a flat space.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  Granularity granularity = {};
  /// Tensors of different parts share no segment, so that each part can be
  /// gathered alone.
  std::int64_t part = 0;
};

struct LayoutOptions {
  /// Every tensor and every shard starts at a multiple of this many elements;
  /// 16 keeps gathered bf16 tensors on 32 bytes and FP8 ones on 16.
  std::int64_t alignment = 16;
};

/// A part of the flat space that is cut into equal shards: shard s holds
/// [offset + s * shard_numel, offset + (s + 1) * shard_numel).
struct Segment {
  /// Holds tensors of granularity `tensor`, of which none is cut.
  bool whole_tensors = false;
  /// Elements; shard boundaries are multiples of it counted from `offset`.
  std::int64_t granule = 0;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int64_t shard_numel = 0;
  /// Where this segment's part begins in the local buffer of one shard, which
  /// is the concatenation of that shard's parts of all segments.
  std::int64_t local_offset = 0;
};

/// The elements [offset, offset + numel) of the flat space.
struct FlatRange {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  bool operator==(const FlatRange&) const = default;
};

/// `count` neighbouring shards: what a rank holds when its buffer is sharded on
/// fewer axes than the layout was cut for.
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

/// Where each tensor of a group is in one flat index space, which range
/// each shard owns, and how much is padding. Integers only, immutable.
///
/// Every tensor is contiguous in the flat space and starts at a multiple of its
/// granule g from the segment's start, where g = lcm(elements of one granule,
/// alignment). A segment's shard is a multiple of the largest granule in it,
/// and that is a multiple of all others, so no boundary cuts a granule.
/// - element(n): one segment per n, in practice one for the whole layout.
/// - row, block(rows): one segment per distinct granule; padding is at most
///   sum(granules) * num_shards / numel where the widths are multiples of the
///   alignment. (A common segment would force its shard to the least common
///   multiple.) Tensors of a finer granule move into the segment of a coarser
///   one that is a multiple of it where that makes no shard longer: they fill
///   the room that the coarse rows leave.
/// - chunk: one segment per tensor, of its granules alone: its start is
/// aligned,
///   the shards that cut it need not be. Where they are not, a segment without
///   tensors follows, which brings the next one and its shards to an alignment.
/// - tensor: one segment; tensors go, largest first, to the shard that holds
///   least so far.
/// A layout has at least one segment. Segments stand in the order of their
/// first tensors; inside one, coarse granules come first, else the given order.
class FlatLayout {
 public:
  /// @param specs  unique non-empty names, no negative sizes. Scalars, empty
  ///   tensors and more shards than granules are normal; a shard may be empty.
  /// @throws Error{usage} for a bad spec.
  static FlatLayout build(
      std::vector<TensorSpec> specs,
      std::int64_t num_shards,
      LayoutOptions options = {});

  /// This layout for elements of one byte that have a scale of one byte for
  /// each `block` of them, as MXFP8 has for 32: behind each segment comes one
  /// of its scales, cut at the same places. Tensor i keeps its number; its
  /// scales are tensor num_tensors() + i.
  /// @throws Error{config} where a boundary, or a tensor, is no multiple of
  ///   `block`.
  FlatLayout with_scales(std::int64_t block) const;
  /// The layout of some neighbouring segments alone, without the tensors: for a
  /// Redistribution of them.
  FlatLayout of_segments(std::int64_t first, std::int64_t count) const;

  /// Elements of the flat space, padding included; equals
  /// num_shards() * shard_numel().
  std::int64_t numel() const { return numel_; }
  std::int64_t num_shards() const { return num_shards_; }
  /// Elements of one shard over all segments.
  std::int64_t shard_numel() const { return numel_ / num_shards_; }

  std::int64_t num_tensors() const {
    return static_cast<std::int64_t>(specs_.size());
  }
  const TensorSpec& spec(std::int64_t i) const;
  /// First element of tensor `i` in the flat space.
  std::int64_t tensor_offset(std::int64_t i) const;
  std::int64_t tensor_numel(std::int64_t i) const;
  /// Index into segments().
  std::int64_t tensor_segment(std::int64_t i) const;
  /// The tensor's index, or nothing.
  std::optional<std::int64_t> find(std::string_view name) const;

  const std::vector<Segment>& segments() const { return segments_; }

  /// numel() less the elements of all tensors.
  std::int64_t padding_numel() const { return numel_ - data_numel_; }
  /// padding_numel() over the elements of all tensors; 0 when there are none.
  double padding_ratio() const;
  /// All elements that belong to no tensor, in flat order.
  std::vector<FlatRange> padding_ranges() const;

  /// The part of tensor `i` that is in shard `shard`: one piece or none,
  /// since a tensor is contiguous and is in one segment.
  std::vector<Piece> shard_pieces(std::int64_t i, std::int64_t shard) const {
    return shard_pieces(i, ShardSpan{shard, 1});
  }
  /// The same for the local buffer of several neighbouring shards, which holds
  /// for each segment their parts in order.
  std::vector<Piece> shard_pieces(std::int64_t i, ShardSpan shards) const;

  /// A readable memory map: segments, tensors and padding with their flat
  /// ranges, then what each shard holds (the first 16 shards).
  std::string describe() const;

 private:
  struct TensorPlace {
    std::int64_t offset = 0;
    std::int64_t numel = 0;
    std::int64_t granule = 1;
    std::int64_t segment = 0;
  };
  /// The tensors of a segment in the order in which they are packed.
  struct Bundle {
    bool whole_tensors = false;
    bool one_chunked = false;  ///< one tensor of granularity `chunk`
    std::int64_t granule = 1;
    std::int64_t part = 0;
    std::vector<std::int64_t> tensors;
  };

  FlatLayout() = default;

  const TensorPlace& place(std::int64_t i) const;
  void pack(std::int64_t num_shards, const LayoutOptions& options);
  std::vector<Bundle> bundles(const LayoutOptions& options) const;
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
