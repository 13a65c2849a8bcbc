#include "flatshard/mesh/coordinates.h"

#include <utility>

#include "flatshard/core/error.h"

namespace flatshard {

MeshCoordinates::MeshCoordinates(
    std::vector<MeshAxis> axes,
    std::vector<std::int64_t> coordinates)
    : axes_(std::move(axes)), coordinates_(std::move(coordinates)) {
  std::int64_t rank = 0;
  for (int a = 0; a < num_axes(); ++a) {
    rank = rank * axes_[a].size + coordinates_.at(a);
  }
  rank_ = static_cast<int>(rank);
}

int MeshCoordinates::size() const {
  return static_cast<int>(detail::num_ranks(axes_));
}

int MeshCoordinates::axis_index(std::string_view name) const {
  for (int a = 0; a < num_axes(); ++a) {
    if (axes_[a].name == name) {
      return a;
    }
  }
  FLATSHARD_THROW(usage, "mesh {} has no axis '{}'", to_string(), name);
}

std::vector<std::int64_t> MeshCoordinates::axis_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const MeshAxis& axis : axes_) {
    sizes.push_back(axis.size);
  }
  return sizes;
}

std::vector<std::string> MeshCoordinates::axis_names() const {
  std::vector<std::string> names;
  for (const MeshAxis& axis : axes_) {
    names.push_back(axis.name);
  }
  return names;
}

std::int64_t MeshCoordinates::coordinate(std::string_view name) const {
  return coordinates_[axis_index(name)];
}

std::int64_t MeshCoordinates::group_size(std::span<const int> axes) const {
  return detail::product(axes_, axes);
}

std::int64_t MeshCoordinates::group_index(std::span<const int> axes) const {
  return detail::shard_index(axes_, coordinates_, axes);
}

std::string MeshCoordinates::to_string() const {
  return detail::axes_to_string(axes_);
}

}  // namespace flatshard
