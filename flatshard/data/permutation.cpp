#include "flatshard/data/permutation.h"

#include <bit>

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"

namespace flatshard::data {
namespace {

// Four rounds make a strong pseudo-random permutation (Luby and Rackoff). Two
// more cost nothing here and help the very small domains.
constexpr int kRounds = 6;

}  // namespace

Permutation::Permutation(std::uint64_t key, std::int64_t size)
    : key_(key), size_(size) {
  FLATSHARD_CHECK(
      size >= 1 && size <= (std::int64_t{1} << 62),
      usage,
      "permutation: expected a size in [1, 2^62], got {}",
      size);
  const int bits = std::bit_width(static_cast<std::uint64_t>(size - 1));
  half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
}

std::int64_t Permutation::operator()(std::int64_t i) const {
  FLATSHARD_CHECK(
      i >= 0 && i < size_,
      usage,
      "permutation: expected an index in [0, {}), got {}",
      size_,
      i);
  // The domain is below 4 * size + 4, so this ends after a few rounds. It ends
  // at all because i itself is on the cycle.
  auto value = static_cast<std::uint64_t>(i);
  do {
    value = round_trip(value);
  } while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

std::uint64_t Permutation::round_trip(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  const Philox philox(key_);
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t mixed = left ^ (philox(right, round)[0] & mask);
    left = right;
    right = mixed;
  }
  return (left << half_bits_) | right;
}

}  // namespace flatshard::data
