#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/mesh/axes.h"

namespace flatshard {

/// Named axes over ranks, outermost first, and where this rank is on them.
///
/// Rank r has coordinates as in C order: the last axis varies fastest. The
/// ranks of a group over several axes are in shard order, the reverse: the
/// innermost axis is split first, so
/// index = inner * outer_size + outer.
class MeshCoordinates {
 public:
  /// @param coordinates  one per axis.
  MeshCoordinates(
      std::vector<MeshAxis> axes,
      std::vector<std::int64_t> coordinates);

  int rank() const { return rank_; }
  /// Returns the number of ranks.
  int size() const;
  int num_axes() const { return static_cast<int>(axes_.size()); }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  const MeshAxis& axis(int index) const { return axes_.at(index); }
  /// @throws Error{usage} naming the axes that exist.
  int axis_index(std::string_view name) const;
  /// Outermost first.
  std::vector<std::int64_t> axis_sizes() const;
  std::vector<std::string> axis_names() const;
  std::int64_t coordinate(int axis) const { return coordinates_.at(axis); }
  std::int64_t coordinate(std::string_view name) const;
  /// Returns one per axis.
  const std::vector<std::int64_t>& coordinates() const { return coordinates_; }

  /// Returns the number of ranks of the group over `axes` (indices, ascending).
  std::int64_t group_size(std::span<const int> axes) const;
  /// This rank's position in that group, in shard order.
  std::int64_t group_index(std::span<const int> axes) const;
  /// E.g. "{outer: 2, dp: 4}".
  std::string to_string() const;

 private:
  std::vector<MeshAxis> axes_;
  std::vector<std::int64_t> coordinates_;
  int rank_ = 0;
};

}  // namespace flatshard
