#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace flatshard {

/// The width of a tensor's rows in elements: the last dimension of a matrix or
/// of a stack of matrices (3-D expert weights are cut at matrix rows, not at
/// dim 0), 1 for vectors and scalars. At least 1, also for empty tensors.
std::int64_t row_width(std::span<const std::int64_t> shape);

/// The smallest piece of a tensor that a shard boundary may not cut.
class Granularity {
 public:
  enum class Kind { element, row, block, tensor };

  /// element(16).
  Granularity() = default;

  /// Runs of `n` elements, counted from the tensor's start.
  /// @throws Error{usage} when n < 1.
  static Granularity element(std::int64_t n = 16);
  /// Rows of `row_width` elements.
  static Granularity row();
  /// Blocks of `rows` rows, counted from the tensor's start; the last block of
  /// a tensor may be shorter.
  /// @throws Error{usage} when rows < 1.
  static Granularity block(std::int64_t rows);
  /// The whole tensor stays on one rank.
  static Granularity tensor();

  Kind kind() const { return kind_; }

  /// Elements per granule of a tensor of this shape.
  /// @throws Error{config} when that number does not fit 64 bits.
  std::int64_t granule_numel(std::span<const std::int64_t> shape) const;

  bool operator==(const Granularity&) const = default;

  /// "element(16)", "row", "block(128)" or "tensor".
  std::string to_string() const;

 private:
  Granularity(Kind kind, std::int64_t size) : kind_(kind), size_(size) {}

  Kind kind_ = Kind::element;
  std::int64_t size_ = 16;
};

}  // namespace flatshard
