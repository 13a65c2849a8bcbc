#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flatshard {

/// The work that the ranks along an axis divide among them.
enum class AxisRole {
  data,      ///< samples: each rank reads its own
  sequence,  ///< the tokens of samples: each rank has its own run of them
  model,     ///< the layers: all ranks read the same tokens
};

struct MeshAxis {
  std::string name;
  std::int64_t size = 1;
  AxisRole role = AxisRole::data;

  bool operator==(const MeshAxis&) const = default;
};

namespace detail {

/// Indices of axes, ascending.
using AxisSet = std::vector<int>;

AxisSet all_axes(std::size_t count);
/// @throws Error{config} for names that repeat, sizes below 1, no such rank.
void check_axes(const std::vector<MeshAxis>& axes, int rank);
std::int64_t num_ranks(const std::vector<MeshAxis>& axes);
/// Returns the number of ranks that differ only in the chosen axes.
std::int64_t product(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen);
/// C order: the last axis varies fastest.
std::vector<std::int64_t> coordinates_of(
    const std::vector<MeshAxis>& axes,
    std::int64_t rank);
/// Shard order: the innermost axis is split first and counts most.
std::int64_t shard_index(
    const std::vector<MeshAxis>& axes,
    const std::vector<std::int64_t>& coordinates,
    std::span<const int> chosen);
/// E.g. "{outer: 2, dp: 4}".
std::string axes_to_string(const std::vector<MeshAxis>& axes);
/// E.g. "outer+dp".
std::string joined_names(
    const std::vector<MeshAxis>& axes,
    std::span<const int> chosen);

}  // namespace detail
}  // namespace flatshard
