#include "flatshard/layout/rectangle.h"

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

namespace flatshard {
namespace {

class Coverer {
 public:
  explicit Coverer(std::span<const std::int64_t> shape) : shape_(shape) {}

  /// Covers the range of the sub-tensor with the leading indices `fixed_`.
  void cover(std::int64_t begin, std::int64_t end) {
    if (begin >= end) {
      return;
    }
    const std::size_t dim = fixed_.size();
    if (dim == shape_.size()) {
      add(0, 1);
      return;
    }
    const std::int64_t inner = detail::numel_of(shape_.subspan(dim + 1), "");
    std::int64_t first = begin / inner;
    const std::int64_t last = end / inner;
    if (first == last) {
      descend(first, begin - first * inner, end - first * inner);
      return;
    }
    if (begin % inner != 0) {
      descend(first, begin % inner, inner);
      ++first;
    }
    if (first < last) {
      add(first, last - first);
    }
    descend(last, 0, end % inner);
  }

  std::vector<Rectangle> take() { return std::move(boxes_); }

 private:
  void descend(std::int64_t index, std::int64_t begin, std::int64_t end) {
    fixed_.push_back(index);
    cover(begin, end);
    fixed_.pop_back();
  }

  /// The box of `count` indices from `index` on in the first free dimension,
  /// and all indices of further dimensions.
  void add(std::int64_t index, std::int64_t count) {
    Rectangle box{fixed_, std::vector<std::int64_t>(fixed_.size(), 1)};
    if (fixed_.size() < shape_.size()) {
      box.start.push_back(index);
      box.length.push_back(count);
      for (std::size_t d = fixed_.size() + 1; d < shape_.size(); ++d) {
        box.start.push_back(0);
        box.length.push_back(shape_[d]);
      }
    }
    boxes_.push_back(std::move(box));
  }

  std::span<const std::int64_t> shape_;
  std::vector<std::int64_t> fixed_;
  std::vector<Rectangle> boxes_;
};

}  // namespace

Rectangle Rectangle::whole(std::span<const std::int64_t> shape) {
  return {
      std::vector<std::int64_t>(shape.size(), 0),
      std::vector<std::int64_t>(shape.begin(), shape.end())};
}

std::int64_t Rectangle::numel() const {
  return detail::numel_of(length, "rectangle");
}

bool Rectangle::lies_in(std::span<const std::int64_t> shape) const {
  bool inside = start.size() == shape.size() && length.size() == shape.size();
  for (std::size_t d = 0; inside && d < shape.size(); ++d) {
    // No sum: it may not fit 64 bits.
    inside = start[d] >= 0 && length[d] >= 0 && length[d] <= shape[d] &&
             start[d] <= shape[d] - length[d];
  }
  return inside;
}

Rectangle Rectangle::intersection(const Rectangle& other) const {
  Rectangle both = *this;
  for (std::size_t d = 0; d < start.size(); ++d) {
    const std::int64_t end =
        std::min(start[d] + length[d], other.start[d] + other.length[d]);
    both.start[d] = std::max(start[d], other.start[d]);
    both.length[d] = std::max<std::int64_t>(end - both.start[d], 0);
  }
  return both;
}

std::string to_string(const Rectangle& box) {
  std::string text = "[";
  for (std::size_t d = 0; d < box.start.size(); ++d) {
    text += fmt::format(
        "{}{}:{}",
        d == 0 ? "" : ", ",
        box.start[d],
        box.start[d] + box.length[d]);
  }
  return text + "]";
}

std::vector<Rectangle> rectangles(
    std::span<const std::int64_t> shape,
    std::int64_t begin,
    std::int64_t end) {
  const std::int64_t numel = detail::numel_of(shape, "rectangles");
  FLATSHARD_CHECK(
      0 <= begin && begin <= end && end <= numel,
      usage,
      "range [{}, {}) is not in a tensor of {} elements",
      begin,
      end,
      numel);
  Coverer coverer(shape);
  coverer.cover(begin, end);
  return coverer.take();
}

FlatRuns::FlatRuns(std::span<const std::int64_t> shape, const Rectangle& box) {
  FLATSHARD_CHECK(
      box.lies_in(shape),
      internal,
      "box {} is not in a tensor of {} dimensions",
      to_string(box),
      shape.size());
  if (box.numel() == 0) {
    size_ = 0;
    return;
  }
  std::int64_t stride = 1;
  bool contiguous = true;
  for (std::size_t d = shape.size(); d-- > 0;) {
    offset_ += box.start[d] * stride;
    if (contiguous) {
      numel_ *= box.length[d];
      contiguous = box.length[d] == shape[d];
    } else if (box.length[d] > 1) {
      outer_.insert(outer_.begin(), {box.length[d], stride});
      size_ *= box.length[d];
    }
    stride *= shape[d];
  }
}

std::int64_t FlatRuns::begin(std::int64_t run) const {
  std::int64_t begin = offset_;
  for (std::size_t i = outer_.size(); i-- > 0;) {
    begin += run % outer_[i].length * outer_[i].stride;
    run /= outer_[i].length;
  }
  return begin;
}

}  // namespace flatshard
