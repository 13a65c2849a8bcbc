#include "flatshard/layout/rectangle.h"

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

namespace flatshard {
namespace {

class Coverer {
 public:
  explicit Coverer(std::span<const std::int64_t> shape) : shape_(shape) {}

  /// Covers [begin, end) of the sub-tensor whose leading indices are `fixed_`.
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
  /// whole in all further ones.
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

std::int64_t Rectangle::numel() const {
  return detail::numel_of(length, "rectangle");
}

std::vector<Rectangle> rectangles(
    std::span<const std::int64_t> shape,
    std::int64_t begin,
    std::int64_t end) {
  const std::int64_t numel = detail::numel_of(shape, "rectangles");
  FLATSHARD_CHECK(
      0 <= begin && begin <= end && end <= numel,
      usage,
      "range [{}, {}) does not lie in a tensor of {} elements",
      begin,
      end,
      numel);
  Coverer coverer(shape);
  coverer.cover(begin, end);
  return coverer.take();
}

}  // namespace flatshard
