#include "flatshard/layout/tensor_slice.h"

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

/// Walks through a box of a rank's tensor and adds the boxes of the larger
/// tensor that it is.
class SliceBoxes {
 public:
  SliceBoxes(
      std::vector<std::vector<IndexRange>> ranges,
      std::vector<Rectangle>& boxes)
      : ranges_(std::move(ranges)), boxes_(boxes) {}

  void add(const Rectangle& local) {
    // Dimensions after the last one that several ranges meet stay together.
    walked_ = 0;
    for (std::size_t d = 0; d < ranges_.size(); ++d) {
      if (ranges_[d].size() > 1 && local.length[d] > 1) {
        walked_ = d;
      }
    }
    walk(local, 0, {});
  }

 private:
  /// Dimensions before `dim` are chosen in `box`.
  void walk(const Rectangle& local, std::size_t dim, Rectangle box) {
    if (dim == ranges_.size()) {
      boxes_.push_back(std::move(box));
      return;
    }
    // If a later dimension is split into ranges, this visits one index at a
    // time. The elements of a box are contiguous.
    const bool one_by_one = dim < walked_;
    std::int64_t at = local.start[dim];
    const std::int64_t end = at + local.length[dim];
    std::int64_t before = 0;  // indices of the rank's tensor in earlier ranges
    for (const IndexRange& range : ranges_[dim]) {
      while (at < end && at < before + range.size()) {
        const std::int64_t length =
            one_by_one ? 1 : std::min(end, before + range.size()) - at;
        Rectangle next = box;
        next.start.push_back(range.begin + at - before);
        next.length.push_back(length);
        walk(local, dim + 1, std::move(next));
        at += length;
      }
      before += range.size();
    }
  }

  std::vector<std::vector<IndexRange>> ranges_;
  std::vector<Rectangle>& boxes_;
  std::size_t walked_ = 0;
};

}  // namespace

std::int64_t TensorSlice::Cut::held() const {
  std::int64_t held = 0;
  for (const IndexRange& range : ranges) {
    held += range.size();
  }
  return held;
}

std::int64_t TensorSlice::Cut::unit(std::span<const std::int64_t> shape) const {
  return counts_parts ? shape[static_cast<std::size_t>(dim)] / held() : 1;
}

TensorSlice TensorSlice::with(Cut cut) const {
  FLATSHARD_CHECK(
      cut.dim >= 0,
      config,
      "slice: expected a dimension counted from 0, got {}",
      cut.dim);
  TensorSlice more = *this;
  const auto place = std::lower_bound(
      more.cuts_.begin(),
      more.cuts_.end(),
      cut.dim,
      [](const Cut& known, std::int64_t dim) { return known.dim < dim; });
  FLATSHARD_CHECK(
      place == more.cuts_.end() || place->dim != cut.dim,
      config,
      "slice: dimension {} is already split; expected at most one split per "
      "dimension",
      cut.dim);
  more.cuts_.insert(place, std::move(cut));
  return more;
}

TensorSlice TensorSlice::cut(
    std::int64_t dim,
    std::int64_t part,
    std::int64_t parts,
    std::int64_t sections) const {
  FLATSHARD_CHECK(
      0 <= part && part < parts && sections > 0,
      config,
      "slice of dimension {}: expected a part below the number of parts and at "
      "least one section, got part {} of {} in {} sections",
      dim,
      part,
      parts,
      sections);
  Cut cut{
      .dim = dim,
      .whole = parts * sections,
      .ranges = {},
      .counts_parts = true};
  for (std::int64_t section = 0; section < sections; ++section) {
    const std::int64_t begin = section * parts + part;
    cut.ranges.push_back({begin, begin + 1});
  }
  return with(std::move(cut));
}

TensorSlice TensorSlice::take(
    std::int64_t dim,
    std::int64_t whole,
    std::vector<IndexRange> ranges) const {
  std::int64_t end = 0;
  for (const IndexRange& range : ranges) {
    FLATSHARD_CHECK(
        range.begin >= end && range.end >= range.begin && range.end <= whole,
        config,
        "slice of dimension {}: expected ascending ranges within the {} of the "
        "full tensor, got [{}, {})",
        dim,
        whole,
        range.begin,
        range.end);
    end = range.end;
  }
  return with({.dim = dim, .whole = whole, .ranges = std::move(ranges)});
}

void TensorSlice::check(
    std::span<const std::int64_t> shape,
    std::string_view what) const {
  for (const Cut& cut : cuts_) {
    FLATSHARD_CHECK(
        cut.dim < static_cast<std::int64_t>(shape.size()),
        config,
        "{}: expected a dimension {} to be a slice along, got shape [{}]",
        what,
        cut.dim,
        fmt::join(shape, ", "));
    const std::int64_t size = shape[static_cast<std::size_t>(cut.dim)];
    FLATSHARD_CHECK(
        cut.counts_parts ? size % cut.held() == 0 : size == cut.held(),
        config,
        "{}: expected {} {} in dimension {} of this rank's slice, got shape "
        "[{}]",
        what,
        cut.counts_parts ? "a multiple of" : "a size of",
        cut.held(),
        cut.dim,
        fmt::join(shape, ", "));
  }
}

std::vector<std::int64_t> TensorSlice::whole_shape(
    std::span<const std::int64_t> shape) const {
  std::vector<std::int64_t> whole(shape.begin(), shape.end());
  for (const Cut& cut : cuts_) {
    whole[static_cast<std::size_t>(cut.dim)] =
        detail::checked_mul(cut.whole, cut.unit(shape), "slice");
  }
  return whole;
}

bool TensorSlice::is_whole(std::span<const std::int64_t> shape) const {
  return std::ranges::equal(whole_shape(shape), shape);
}

std::vector<IndexRange> TensorSlice::ranges(
    std::span<const std::int64_t> shape,
    std::size_t dim) const {
  for (const Cut& cut : cuts_) {
    if (cut.dim == static_cast<std::int64_t>(dim)) {
      std::vector<IndexRange> ranges;
      for (const IndexRange& range : cut.ranges) {
        const std::int64_t unit = cut.unit(shape);
        if (!ranges.empty() && ranges.back().end == range.begin * unit) {
          ranges.back().end = range.end * unit;
        } else {
          ranges.push_back({range.begin * unit, range.end * unit});
        }
      }
      return ranges;
    }
  }
  return {{0, shape[dim]}};
}

std::vector<Rectangle> TensorSlice::boxes(
    std::span<const std::int64_t> shape,
    std::int64_t begin,
    std::int64_t end) const {
  std::vector<std::vector<IndexRange>> ranges;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    ranges.push_back(this->ranges(shape, d));
  }
  std::vector<Rectangle> boxes;
  SliceBoxes slice_boxes(std::move(ranges), boxes);
  for (const Rectangle& local : rectangles(shape, begin, end)) {
    slice_boxes.add(local);
  }
  return boxes;
}

}  // namespace flatshard
