#include "flatshard/mesh/axes.h"

#include <fmt/format.h>

#include <numeric>
#include <set>

#include "flatshard/core/error.h"

namespace flatshard::detail {

std::string joined_names(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen) {
  std::string text;
  for (const int axis : chosen) {
    text += (text.empty() ? "" : "+") + axes[axis].name;
  }
  return text;
}

std::string axes_to_string(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) {
    text +=
        fmt::format("{}{}: {}", text.empty() ? "" : ", ", axis.name, axis.size);
  }
  return "{" + text + "}";
}

std::int64_t num_ranks(const std::vector<MeshAxis>& axes) {
  std::int64_t ranks = 1;
  for (const MeshAxis& axis : axes) {
    ranks *= axis.size;
  }
  return ranks;
}

void check_axes(const std::vector<MeshAxis>& axes, int rank) {
  FLATSHARD_CHECK(!axes.empty(), config, "a mesh requires at least one axis");
  std::set<std::string> names;
  for (const MeshAxis& axis : axes) {
    FLATSHARD_CHECK(
        !axis.name.empty() && names.insert(axis.name).second,
        config,
        "mesh {}: expected axis names that are not empty and differ, got '{}'",
        axes_to_string(axes),
        axis.name);
    FLATSHARD_CHECK(
        axis.size >= 1,
        config,
        "mesh {}: expected size >= 1 for axis '{}', got {}",
        axes_to_string(axes),
        axis.name,
        axis.size);
  }
  FLATSHARD_CHECK(
      rank >= 0 && rank < num_ranks(axes),
      config,
      "mesh {}: expected a rank below {}, got {}",
      axes_to_string(axes),
      num_ranks(axes),
      rank);
}

std::vector<std::int64_t> coordinates_of(
    const std::vector<MeshAxis>& axes,
    std::int64_t rank) {
  std::vector<std::int64_t> coordinates(axes.size());
  for (std::size_t a = axes.size(); a-- > 0;) {
    coordinates[a] = rank % axes[a].size;
    rank /= axes[a].size;
  }
  return coordinates;
}

std::int64_t shard_index(
    const std::vector<MeshAxis>& axes,
    const std::vector<std::int64_t>& coordinates,
    std::span<const int> chosen) {
  std::int64_t index = 0;
  for (std::size_t i = chosen.size(); i-- > 0;) {
    index = index * axes[chosen[i]].size + coordinates[chosen[i]];
  }
  return index;
}

std::int64_t product(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen) {
  std::int64_t ranks = 1;
  for (const int axis : chosen) {
    ranks *= axes[axis].size;
  }
  return ranks;
}

AxisSet all_axes(std::size_t count) {
  AxisSet axes(count);
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

}  // namespace flatshard::detail
