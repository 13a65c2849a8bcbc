#include "flatshard/group/float8_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace flatshard {

std::string Float8Format::why_not(std::span<const std::int64_t> shape) const {
  if (shape.size() != 2) {
    return fmt::format("[{}] is no matrix", fmt::join(shape, ", "));
  }
  std::int64_t multiple = 16;  // what FP8 products need
  if (recipe == float8::Recipe::blockwise) {
    multiple = float8::kBlock;
  } else if (recipe == float8::Recipe::mxfp8) {
    multiple = float8::kMxBlock;
  }
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
