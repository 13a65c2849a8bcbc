#include "flatshard/group/float8_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include "flatshard/core/log.h"

namespace flatshard {
namespace {

// Slices of a unit are few (PlaneSet). Two planes have parts.
constexpr std::int64_t kMaxParts = 24;
// Views of sharded scales begin at a multiple of so many.
constexpr std::int64_t kScaleAlignment = 16;

}  // namespace

std::vector<std::int64_t> Float8Format::parts_of(
    std::int64_t num_parameters) const {
  const bool cut = gather_parts != GatherParts::unit;
  const std::int64_t num_parts = cut ? std::min(num_parameters, kMaxParts) : 1;
  if (cut && num_parameters > kMaxParts) {
    static std::once_flag said;
    std::call_once(said, [&] {
      log_warning(
          "{} FP8 weights of one unit are gathered in {} parts, so that some "
          "weights are gathered together; smaller units would be gathered "
          "weight by weight (logged once)",
          num_parameters,
          num_parts);
    });
  }
  std::vector<std::int64_t> parts;
  for (std::int64_t i = 0; i < num_parameters; ++i) {
    parts.push_back(i * num_parts / num_parameters);
  }
  return parts;
}

std::int64_t Float8Format::alignment(std::int64_t least) const {
  return std::max(least, kScaleAlignment * block_of_stored_scales());
}

Granularity Float8Format::granularity() const {
  // Scales along the columns of a weight belong to blocks of rows.
  const float8::RecipeTraits traits = float8::traits_of(recipe);
  return traits.scales_are_sharded && stored_columns
             ? Granularity::block(traits.block_inner)
             : Granularity::row();
}

std::string Float8Format::why_not(std::span<const std::int64_t> shape) const {
  if (shape.size() != 2) {
    return fmt::format("[{}] is no matrix", fmt::join(shape, ", "));
  }
  const std::int64_t multiple = float8::traits_of(recipe).multiple;
  for (const std::size_t dim : {0, 1}) {
    if (shape[dim] == 0 || shape[dim] % multiple != 0) {
      return fmt::format(
          "{} {} are no multiple of {}",
          shape[dim],
          dim == 0 ? "rows" : "columns",
          multiple);
    }
  }
  return {};
}

}  // namespace flatshard
