#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace flatshard {

/// Returns the width of a tensor's rows in elements, at least 1, also for empty
/// tensors. It is the last dimension of a matrix or of a stack of matrices, and
/// 1 for vectors and scalars. So 3-D expert weights are split at matrix rows,
/// not at dim 0.
std::int64_t row_width(std::span<const std::int64_t> shape);

/// The smallest piece of a tensor that a shard boundary may not split. A name
/// means the same in C++, in the trainer's config and in Python:
///
/// | name    | granule                                                       |
/// |---------|---------------------------------------------------------------|
/// | element | 16 elements                                                   |
/// | row     | a row along the last dimension; see row_width                 |
/// | dim0    | a slice of dimension 0; a DTensor can express it              |
/// | block:N | N rows                                                        |
/// | chunk   | a slice of dimension 0, and each shard is the chunk that      |
/// |         | torch.chunk returns for it, like FSDP2's shards               |
/// | tensor  | the entire tensor: it stays on one rank                       |
class Granularity {
 public:
  enum class Kind { element, row, dim0, block, chunk, tensor };

  /// element(16).
  Granularity() = default;

  /// Splits at runs of `n` elements, counted from the tensor's start.
  /// @throws Error{usage} when n < 1.
  static Granularity element(std::int64_t n = 16);
  /// Splits at rows of `row_width` elements.
  static Granularity row();
  /// Slices along the first dimension.
  static Granularity dim0();
  /// Blocks of `rows` rows, counted from the tensor's start. The last block of
  /// a tensor may be shorter.
  /// @throws Error{usage} when rows < 1.
  static Granularity block(std::int64_t rows);
  /// Splits like torch.chunk along the first dimension: every shard except the
  /// last ones has ceil(size / shards) slices. Each tensor has its own segment,
  /// so a group is all-gathered by one collective per tensor.
  static Granularity chunk();
  /// Keeps the entire tensor on one rank.
  static Granularity tensor();

  /// Returns the granularity of a name in the table.
  /// @throws Error{config} that starts with `option` for any other name.
  static Granularity parse(
      std::string_view name,
      std::string_view option = "granularity");

  Kind kind() const { return kind_; }

  /// Returns the number of elements per granule of a tensor of this shape.
  /// @throws Error{config} when that number does not fit 64 bits.
  std::int64_t granule_numel(std::span<const std::int64_t> shape) const;

  bool operator==(const Granularity&) const = default;

  /// "element(16)", "row", "dim0", "block(128)", "chunk" or "tensor".
  std::string to_string() const;

 private:
  Granularity(Kind kind, std::int64_t size) : kind_(kind), size_(size) {}

  Kind kind_ = Kind::element;
  std::int64_t size_ = 16;
};

}  // namespace flatshard
