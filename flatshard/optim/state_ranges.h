#pragma once

#include <cstdint>
#include <vector>

#include "flatshard/optim/state_format.h"

namespace flatshard {

/// A parameter's part of a flat shard.
struct StatePart {
  std::int64_t begin = 0;  ///< first element, in the shard
  StateFormat format = StateFormat::float32;
};

/// Returns the ranges of a shard of `numel` elements, each from its first part
/// to the first one of the next range: padding has the format of the part
/// before it. Without parts it is float32.
std::vector<StateRange> state_ranges(
    std::vector<StatePart> parts,
    std::int64_t numel);

/// Returns how many elements have a format.
std::int64_t numel_of(
    const std::vector<StateRange>& ranges,
    StateFormat format);

/// Returns the bytes of AdamW's two states.
std::int64_t states_nbytes(const std::vector<StateRange>& ranges);

}  // namespace flatshard
