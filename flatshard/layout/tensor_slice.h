#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "flatshard/layout/rectangle.h"

namespace flatshard {

/// The indices [`begin`, `end`) of one dimension.
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  bool operator==(const IndexRange&) const = default;
};

/// The part of a larger tensor that a rank's tensor is. In each dimension it
/// has some ranges of the larger one's indices, one after another, or all
/// indices. So it is one box of the larger tensor, or several that are stored
/// together: of gate and up in one tensor, a rank has a box of each.
///
/// The slice does not include the shape of the rank's tensor. One slice serves
/// all tensors that are split alike, such as the weights of all experts.
class TensorSlice {
 public:
  /// Nothing is split.
  TensorSlice() = default;

  /// Splits `dim`, too: the larger tensor has `sections` equally long sections
  /// along it, and this slice the `part`-th of `parts` equal parts of each.
  /// @throws Error{config} when `part` is not below `parts`, or `dim` is split.
  TensorSlice cut(
      std::int64_t dim,
      std::int64_t part,
      std::int64_t parts,
      std::int64_t sections = 1) const;
  /// Splits `dim`, too: of the `whole` indices of the larger tensor this slice
  /// has `ranges`, in ascending order.
  /// @throws Error{config} when they do not, or leave the dimension.
  TensorSlice take(
      std::int64_t dim,
      std::int64_t whole,
      std::vector<IndexRange> ranges) const;

  /// @param shape  of the rank's tensor, as in all that follows.
  /// @throws Error{config} naming `what` when no tensor of this shape can be
  ///   this slice.
  void check(std::span<const std::int64_t> shape, std::string_view what) const;
  /// Returns the shape of the larger tensor.
  std::vector<std::int64_t> whole_shape(
      std::span<const std::int64_t> shape) const;
  /// Returns whether the rank's tensor is all of the larger one.
  bool is_whole(std::span<const std::int64_t> shape) const;
  /// Returns the boxes of the larger tensor that are the elements [`begin`,
  /// `end`) of the flattened rank's tensor. They are in the order of these
  /// elements, and each box is contiguous in the rank's tensor. For a slice
  /// that is one box there are at most max(1, 2 * ndim - 1).
  std::vector<Rectangle> boxes(
      std::span<const std::int64_t> shape,
      std::int64_t begin,
      std::int64_t end) const;

  bool operator==(const TensorSlice&) const = default;

 private:
  struct Cut {
    std::int64_t dim = 0;
    std::int64_t whole = 0;  ///< indices of the larger tensor, or parts
    std::vector<IndexRange> ranges;
    /// Ranges and `whole` count equal parts. Their length follows from the
    /// rank's tensor.
    bool counts_parts = false;

    std::int64_t held() const;
    /// Returns the number of indices for each that `whole` and `ranges` count.
    std::int64_t unit(std::span<const std::int64_t> shape) const;
    bool operator==(const Cut&) const = default;
  };

  TensorSlice with(Cut cut) const;
  /// Returns the ranges of the larger tensor's dimension `dim`.
  std::vector<IndexRange> ranges(
      std::span<const std::int64_t> shape,
      std::size_t dim) const;

  std::vector<Cut> cuts_;  ///< by dimension
};

}  // namespace flatshard
