#include "flatshard/group/float8_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "flatshard/core/log.h"
#include "flatshard/core/rounding.h"

namespace flatshard {
namespace {

// Slices of a unit are few (PlaneSet). Two planes have parts.
constexpr std::int64_t kMaxParts = 24;
// Views of sharded scales start at a multiple of this.
constexpr std::int64_t kScaleAlignment = 16;

// Returns the number of scales of a plane [outer, inner], in the order of
// float8::Plane. Rows of block scales are as long as cuBLASLt reads them.
std::int64_t num_scales(
    const float8::RecipeTraits& traits,
    std::int64_t outer,
    std::int64_t inner) {
  if (traits.has_one_scale()) {
    return 1;
  }
  const std::int64_t rows = outer / traits.block_outer;
  return traits.block_inner == 0
             ? rows
             : rows * round_up(inner / traits.block_inner, kScaleMultiple);
}

}  // namespace

std::vector<std::int64_t> Float8Format::parts_of(
    std::int64_t num_parameters) const {
  const bool cut = gather_parts != GatherParts::unit;
  const std::int64_t num_parts = cut ? std::min(num_parameters, kMaxParts) : 1;
  if (cut && num_parameters > kMaxParts) {
    static std::once_flag said;
    std::call_once(said, [&] {
      log_warning(
          "{} FP8 weights of one unit are all-gathered in {} parts, so some "
          "weights are all-gathered together; smaller units would all-gather "
          "each weight separately (logged once)",
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

Float8Shape Float8Format::shape_of(
    const std::vector<TensorSpec>& weights) const {
  const float8::RecipeTraits traits = float8::traits_of(recipe);
  Float8Shape shape{
      .recipe = std::string(float8::to_string(recipe)),
      .sharded_scales_block = block_of_stored_scales(),
      .stored_columns = stored_columns,
      .scales_behind_columns =
          !traits.scales_are_sharded && float8::has_power_of_two_scales(recipe),
      .gather_parts = gather_parts};
  if (traits.scales_are_sharded) {
    return shape;
  }
  const auto take = [&](std::int64_t n) {
    return std::exchange(
        shape.num_scales,
        shape.num_scales + round_up(n, kScaleMultiple));
  };
  for (const TensorSpec& weight : weights) {
    const std::int64_t rows = weight.shape[0];
    const std::int64_t columns = weight.shape[1];
    const std::int64_t of_rows = take(num_scales(traits, rows, columns));
    shape.scale_offsets.push_back(
        {of_rows,
         stored_columns || transposes_scales()
             ? take(num_scales(traits, columns, rows))
             : of_rows});
  }
  return shape;
}

std::string Float8Format::why_not(std::span<const std::int64_t> shape) const {
  if (shape.size() != 2) {
    return fmt::format("[{}] is not a matrix", fmt::join(shape, ", "));
  }
  const std::int64_t multiple = float8::traits_of(recipe).multiple;
  for (const std::size_t dim : {0, 1}) {
    if (shape[dim] == 0 || shape[dim] % multiple != 0) {
      return fmt::format(
          "{} {} are not a multiple of {}",
          shape[dim],
          dim == 0 ? "rows" : "columns",
          multiple);
    }
  }
  return {};
}

}  // namespace flatshard
