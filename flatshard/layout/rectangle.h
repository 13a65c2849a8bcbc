#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flatshard {

/// An axis-aligned box of a tensor: `start[d]` and `length[d]` per dimension
/// (both empty for a scalar).
struct Rectangle {
  std::vector<std::int64_t> start;
  std::vector<std::int64_t> length;

  /// Returns all of a tensor.
  static Rectangle whole(std::span<const std::int64_t> shape);
  std::int64_t numel() const;
  /// It is in a tensor of this shape.
  bool lies_in(std::span<const std::int64_t> shape) const;
  /// Returns the common part. A length is 0 where they have nothing in common.
  /// Both belong to one tensor.
  Rectangle intersection(const Rectangle& other) const;
  bool operator==(const Rectangle&) const = default;
};

/// E.g. "[0:2, 5:9]", as Python's slices; "[]" of a scalar.
std::string to_string(const Rectangle& box);

/// The boxes that cover exactly the elements [`begin`, `end`) of a row-major
/// tensor, in flat order: each box is contiguous in the tensor, and there are
/// at most max(1, 2 * ndim - 1).
/// @throws Error{usage} when the range is outside the tensor.
std::vector<Rectangle> rectangles(
    std::span<const std::int64_t> shape,
    std::int64_t begin,
    std::int64_t end);

/// A box as runs of the flattened row-major tensor: equally long ones, in the
/// order of the box's elements. The longest ones possible.
class FlatRuns {
 public:
  /// @param box  is in a tensor of `shape`.
  FlatRuns(std::span<const std::int64_t> shape, const Rectangle& box);

  /// Returns how many there are; 0 when the box is empty.
  std::int64_t size() const { return size_; }
  /// Returns the number of elements of each.
  std::int64_t numel() const { return numel_; }
  /// Returns the first element of a run, in the flattened tensor.
  std::int64_t begin(std::int64_t run) const;

 private:
  struct Outer {
    std::int64_t length = 0;
    std::int64_t stride = 0;  ///< elements of the tensor
  };

  std::int64_t offset_ = 0;
  std::int64_t numel_ = 1;
  std::int64_t size_ = 1;
  std::vector<Outer> outer_;  ///< dimensions over which runs are counted
};

/// Calls `visit(begin in the flattened tensor, begin in the box, numel)` for
/// each run of a box's elements [first, last), counted in its own order.
template <class F>
void for_each_run(
    const FlatRuns& runs,
    std::int64_t first,
    std::int64_t last,
    F&& visit) {
  while (first < last) {
    const std::int64_t run = first / runs.numel();
    const std::int64_t inside = first - run * runs.numel();
    const std::int64_t n = std::min(runs.numel() - inside, last - first);
    visit(runs.begin(run) + inside, first, n);
    first += n;
  }
}

}  // namespace flatshard
