#pragma once

#include "flatshard/fully_shard/describe.h"
#include "flatshard/optim/muon/matrix_window.h"
#include "flatshard/optim/update_parts.h"
#include "flatshard/plan/job.h"

#include <compare>
#include <cstdint>
#include <utility>
#include <vector>

namespace flatshard {

/// An axis of the model's mesh along which ranks store other parts of a group.
struct MatrixAxis {
  std::int64_t size = 1;
  std::int64_t stride = 1;  ///< of the model's ranks
  bool is_own = true;       ///< of the group's mesh; else it splits tensors

  /// Groups of the same ranks share windows.
  auto operator<=>(const MatrixAxis& other) const {
    return std::pair(size, stride) <=> std::pair(other.size, other.stride);
  }
};

/// The ranks that store a group together: see shard_axes.
struct MatrixRanks {
  std::vector<MatrixAxis> axes;

  std::int64_t size() const {
    std::int64_t ranks = 1;
    for (const MatrixAxis& axis : axes) {
      ranks *= axis.size;
    }
    return ranks;
  }

  /// A rank's part of the tensors, and its shard of that part.
  struct Place {
    std::int64_t part = 0;
    std::int64_t shard = 0;
  };
  Place place_of(std::int64_t rank) const {
    Place place;
    std::int64_t ranks = size();
    for (const MatrixAxis& axis : axes) {
      ranks /= axis.size;
      std::int64_t& index = axis.is_own ? place.shard : place.part;
      index = index * axis.size + rank / ranks % axis.size;
    }
    return place;
  }

  bool operator<(const MatrixRanks& other) const { return axes < other.axes; }
};

/// Returns the coordinates of one rank of each shard of a group, in its mesh.
std::vector<std::vector<std::int64_t>> shard_coordinates(
    const GroupShape& shape);

/// The work of Muon's matrices, in the windows that the optimizer would have.
class PlannedMatrices {
 public:
  /// @param groups  outlive this.
  explicit PlannedMatrices(const ParameterGroups& groups) : groups_(&groups) {}

  /// Adds the matrices of one part of a group, in the order of the run.
  void add(
      UnitId unit,
      const GroupDescription& group,
      const GroupPlan& plan,
      const UpdatePart& part);
  /// Returns the work of each window.
  std::vector<plan::MatrixWork> finish();

 private:
  /// Matrices of some groups that are orthogonalized together.
  struct Window {
    MatrixRanks ranks;
    UnitId first = kNoUnit;
    UnitId last = kNoUnit;
    std::vector<WindowMatrix> matrices;
    std::vector<std::int64_t> ns_steps;  ///< of each matrix
    std::vector<std::vector<MatrixBox>> boxes_of_ranks;
  };

  static void add_parameter(
      const GroupParameter& parameter,
      const std::vector<std::vector<Piece>>& pieces,
      const MatrixRanks& ranks,
      const std::vector<MatrixShape>& matrices,
      Window& window);
  static plan::MatrixWork work_of(Window window);

  const ParameterGroups* groups_;
  WindowRule<MatrixRanks> rule_;
  std::vector<Window> windows_;
};

}  // namespace flatshard
