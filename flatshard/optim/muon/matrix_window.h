#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "flatshard/comm/communicator.h"
#include "flatshard/layout/rectangle.h"
#include "flatshard/optim/muon/matrix_plan.h"
#include "flatshard/optim/muon/newton_schulz.h"

namespace flatshard {

/// A matrix of a group.
struct WindowMatrix {
  MatrixShape shape;
  std::size_t group = 0;
  std::size_t index = 0;       ///< of its parameter in the group
  std::int64_t parameter = 0;  ///< unique in the window
  /// One of many matrices of one shape in its parameter, such as experts:
  /// multiplied together with others of them.
  bool batched = false;
};

/// Returns the options of one matrix. Equal for the matrices of a parameter.
using NewtonSchulzOf =
    std::function<const NewtonSchulzOptions&(const WindowMatrix&)>;

/// A rank's part of a matrix, in the flat shard of its group.
struct ShardBox {
  MatrixBox box;
  std::int64_t local_offset = 0;
};

/// Adds a rank's parts of the matrices of one parameter.
/// @param whole_shape   of the parameter: two dimensions, or a stack of three.
/// @param parts         of the parameter, one after another in the shard.
/// @param local_offset  of the first part.
/// @param matrices      of the parameter.
/// @param base          the index of the first of them.
void append_boxes(
    const std::vector<std::int64_t>& whole_shape,
    const std::vector<Rectangle>& parts,
    std::int64_t local_offset,
    const std::vector<MatrixShape>& matrices,
    std::int64_t base,
    std::vector<ShardBox>& boxes);

/// Matrices of one shape that are multiplied together.
struct MatrixBatch {
  std::size_t first = 0;  ///< index among the matrices of the rank
  std::int64_t count = 1;
  MatrixShape shape;
};

/// Returns the batches of the matrices of one rank.
/// @param owned  indices into `matrices`, ascending.
std::vector<MatrixBatch> batches_of(
    const std::vector<WindowMatrix>& matrices,
    const std::vector<std::int64_t>& owned);

/// Directions and results are bfloat16.
inline constexpr std::int64_t kDirectionNbytes = 2;

/// Bytes of a window's matrices on one rank. Larger windows balance the owners'
/// work better, smaller ones need less memory.
inline constexpr std::int64_t kWindowNbytes = std::int64_t{512} << 20;

/// Assigns groups to windows, in the order in which they are added.
/// @tparam Ranks  identifies the ranks that store a group together.
template <class Ranks>
class WindowRule {
 public:
  /// Adds a group with `numel` elements of matrices.
  /// @return  its window, possibly a new one. Windows are counted from 0.
  std::size_t
  window_for(const Ranks& ranks, std::int64_t num_ranks, std::int64_t numel) {
    const auto [open, is_new] = open_.try_emplace(ranks, numels_.size());
    if (!is_new &&
        (numels_[open->second] + numel) * kDirectionNbytes / num_ranks >
            kWindowNbytes) {
      open->second = numels_.size();
    }
    numels_.resize(std::max(numels_.size(), open->second + 1));
    numels_[open->second] += numel;
    return open->second;
  }

 private:
  std::map<Ranks, std::size_t> open_;
  std::vector<std::int64_t> numels_;  ///< of each window
};

/// A run of the flat shard of a group, in the same order in a buffer.
/// All of it belongs to matrices of one shape of one parameter.
struct DirectionRun {
  std::size_t group = 0;
  std::size_t index = 0;  ///< WindowMatrix::index
  std::int64_t local_offset = 0;
  std::int64_t begin = 0;  ///< in the buffer
  std::int64_t numel = 0;
  MatrixShape shape;  ///< of the matrices
};

/// Matrices that are orthogonalized together: one collective sends their parts
/// to the owners, and another returns the results.
class MatrixWindow {
 public:
  /// Collective over `ranks`.
  /// @param ranks     that store the matrices together; null: only this rank.
  /// @param matrices  equal on all ranks.
  /// @param boxes     of this rank, ascending in matrix.
  MatrixWindow(
      Communicator* ranks,
      std::vector<WindowMatrix> matrices,
      std::vector<ShardBox> boxes);

  const MatrixPlan& plan() const { return plan_; }
  Communicator* ranks() const { return ranks_; }

  /// Starts a step of some matrices. The last one may have ended by an
  /// exception.
  /// @param is_active  equal on all ranks.
  /// @return  runs().
  const std::vector<DirectionRun>& begin(
      const std::function<bool(const WindowMatrix&)>& is_active);
  /// Returns the runs of this rank. The caller writes each into buffer().
  const std::vector<DirectionRun>& runs() const { return runs_; }
  /// Returns the buffer for the runs, bfloat16 on `device`, allocated by the
  /// first call in a step.
  const at::Tensor& buffer(at::Device device);
  /// Replaces the values of the buffer by the orthogonalized matrices'.
  /// Collective over ranks(), if a matrix is active.
  void orthogonalize(const NewtonSchulzOf& options_of);
  /// Ends the step and frees the buffer.
  void end() { buffer_.reset(); }

 private:
  void run_newton_schulz(
      const at::Tensor& matrices,
      const NewtonSchulzOf& options_of) const;

  Communicator* ranks_;
  std::vector<WindowMatrix> matrices_;
  std::vector<ShardBox> boxes_;
  MatrixPlan plan_;
  std::vector<bool> active_;  ///< of exchange_, for each matrix
  MatrixExchange exchange_;
  std::vector<DirectionRun> runs_;
  at::Tensor buffer_;
};

}  // namespace flatshard
