#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// The size of a matrix that is orthogonalized.
struct MatrixShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::int64_t numel() const { return rows * columns; }
  bool operator==(const MatrixShape&) const = default;
};

/// A part of a matrix that a rank stores: contiguous, row by row.
struct MatrixBox {
  std::int64_t matrix = 0;  ///< index of the matrix
  std::int64_t row = 0;     ///< first row
  std::int64_t column = 0;  ///< first column
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::int64_t numel() const { return rows * columns; }
  bool operator==(const MatrixBox&) const = default;
};

/// Elements [`begin`, `begin + numel`) of a buffer that are sent to a rank or
/// received from it.
struct MatrixTransfer {
  int peer = 0;
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

/// One rank's part of the exchange that brings every matrix to its owner. The
/// way back is the same with sends and receives swapped.
struct MatrixExchange {
  /// The first element of each of this rank's boxes in its buffer of boxes, in
  /// the order in which the plan was given them; -1: not exchanged.
  std::vector<std::int64_t> begin_of_box;
  std::int64_t boxes_numel = 0;  ///< of the buffer of boxes
  /// A matrix of this rank, complete and contiguous in its buffer of matrices.
  struct Owned {
    std::int64_t matrix = 0;
    std::int64_t begin = 0;
  };
  std::vector<Owned> owned;  ///< by ascending matrix
  /// A box that is not contiguous in its matrix. It is exchanged through a
  /// separate place in the buffer of matrices.
  struct Staged {
    MatrixBox box;
    std::int64_t begin = 0;         ///< of the separate place
    std::int64_t matrix_begin = 0;  ///< of the matrix
  };
  std::vector<Staged> staged;
  std::int64_t matrices_numel = 0;  ///< of the buffer of matrices
  /// From the buffer of boxes, and into the buffer of matrices.
  std::vector<MatrixTransfer> sends;
  std::vector<MatrixTransfer> receives;
};

/// The rank that orthogonalizes each matrix, and the transfers to it. Integers
/// only and immutable. Equal arguments give the same plan on every rank.
///
/// A matrix of l x s elements (l >= s) costs s^2 * (2 l + s) multiplications in
/// each iteration. Matrices are assigned by descending cost. Each goes to the
/// rank that stores most of it, among the ranks whose work stays at most 10 %
/// above the mean. If there is none, it goes to the rank with the least work.
class MatrixPlan {
 public:
  /// @param boxes_of_ranks  for each rank the boxes that it stores. Together
  ///   they are all elements of all matrices, each element once.
  /// @throws Error{internal} when they are not, naming a matrix.
  static MatrixPlan build(
      std::vector<MatrixShape> matrices,
      std::vector<std::vector<MatrixBox>> boxes_of_ranks);

  int num_ranks() const { return static_cast<int>(boxes_.size()); }
  const std::vector<MatrixShape>& matrices() const { return matrices_; }
  int owner(std::int64_t matrix) const { return owners_.at(matrix); }
  /// Returns the multiplications of an iteration for one matrix.
  std::int64_t cost(std::int64_t matrix) const;
  /// Returns the multiplications of an iteration on each rank.
  std::vector<std::int64_t> loads() const;
  /// Returns the matrices of one rank, ascending.
  std::vector<std::int64_t> owned(int rank) const;
  /// Returns the number of elements that a rank stores.
  std::int64_t stored_numel(int rank) const;
  /// Returns how many elements this rank sends to other ranks, on the way to
  /// the owners.
  std::int64_t sent_numel(int rank) const;
  /// Returns whether every rank stores its own matrices complete, so that
  /// nothing has to be exchanged.
  bool is_local() const;
  /// Returns a hash of all arguments and owners, equal where the plans are.
  std::uint64_t hash() const;

  /// Returns this rank's part of the exchange of some matrices.
  /// @param active  one for each matrix.
  MatrixExchange exchange(int rank, const std::vector<bool>& active) const;

 private:
  /// The arrivals at one owner.
  struct Arrivals {
    std::vector<MatrixExchange::Owned> owned;
    std::vector<MatrixExchange::Staged> staged;
    /// For each sender, in the sender's order.
    std::vector<std::vector<MatrixTransfer>> from;
    std::int64_t numel = 0;
  };

  void check() const;
  void assign();
  Arrivals arrivals(int owner, const std::vector<bool>& active) const;

  std::vector<MatrixShape> matrices_;
  std::vector<std::vector<MatrixBox>> boxes_;
  std::vector<int> owners_;
};

}  // namespace flatshard
