#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flatshard {

/// An axis-aligned box of a tensor: `start[d]` and `length[d]` per dimension
/// (both empty for a scalar).
struct Rectangle {
  std::vector<std::int64_t> start;
  std::vector<std::int64_t> length;

  std::int64_t numel() const;
  bool operator==(const Rectangle&) const = default;
};

/// The boxes that cover exactly the elements [begin, end) of a row-major
/// tensor, in flat order: each box is contiguous in the tensor, and there are
/// at most max(1, 2 * ndim - 1).
/// @throws Error{usage} when the range does not lie in the tensor.
std::vector<Rectangle> rectangles(
    std::span<const std::int64_t> shape,
    std::int64_t begin,
    std::int64_t end);

}  // namespace flatshard
