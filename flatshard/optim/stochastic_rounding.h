#pragma once

#include <cstdint>

#include "flatshard/float8/formats.h"

/// Stochastic rounding of float32 to bfloat16, without torch: up with the
/// probability that makes the mean exact. The random bits of an element depend
/// only on the seed, the parameter's name, the element's index in it and the
/// step. So replicas agree, and the mesh changes nothing.
namespace flatshard {

/// A run of the flat shard that is a part of one parameter. Element i of the
/// shard is element i + shift of the parameter.
struct RoundingRange {
  std::int64_t end = 0;  ///< first element after the run
  std::int64_t shift = 0;
  std::uint64_t key = 0;  ///< of Philox: seed and name

  bool operator==(const RoundingRange&) const = default;
};

namespace stochastic_rounding {

/// Returns the Philox block with the bits of a parameter's element. The high
/// half of the counter is the step. Eight elements share a block: four adjacent
/// ones, and four that are 128 further, as a GPU's thread has them.
FLATSHARD_HOST_DEVICE inline std::uint64_t block_of(std::int64_t element) {
  const auto e = static_cast<std::uint64_t>(element);
  return e / 256 * 32 + e % 128 / 4;
}

/// Returns which of the eight 16-bit halves of the block's words it has, the
/// low half of a word first.
FLATSHARD_HOST_DEVICE inline int half_of(std::int64_t element) {
  return static_cast<int>(element / 128 % 2 * 4 + element % 4);
}

/// Returns the bits of the bfloat16.
/// @param random  uniform in [0, 2^16).
FLATSHARD_HOST_DEVICE inline std::uint16_t round(
    float value,
    std::uint32_t random) {
  const std::uint32_t bits = float8::bits_of(value);
  if ((bits & float8::kInfBits) == float8::kInfBits) {
    const bool is_nan = (bits & 0x7fffffU) != 0;
    return static_cast<std::uint16_t>((bits >> 16) | (is_nan ? 0x40U : 0U));
  }
  return static_cast<std::uint16_t>((bits + random) >> 16);
}

}  // namespace stochastic_rounding
}  // namespace flatshard
