#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"

namespace flatshard::detail {

// Sizes are user input, so a sum or a multiplication that overflows 64 bits is
// an error that names the size, not undefined behavior.

inline std::int64_t
checked_mul(std::int64_t a, std::int64_t b, std::string_view what) {
  std::int64_t result = 0;
  FLATSHARD_CHECK(
      !__builtin_mul_overflow(a, b, &result),
      config,
      "{}: {} * {} elements do not fit 64 bits",
      what,
      a,
      b);
  return result;
}

inline std::int64_t
checked_add(std::int64_t a, std::int64_t b, std::string_view what) {
  std::int64_t result = 0;
  FLATSHARD_CHECK(
      !__builtin_add_overflow(a, b, &result),
      config,
      "{}: {} + {} elements do not fit 64 bits",
      what,
      a,
      b);
  return result;
}

inline std::int64_t
round_up(std::int64_t a, std::int64_t b, std::string_view what) {
  return checked_mul(ceil_div(a, b), b, what);
}

inline std::int64_t
checked_lcm(std::int64_t a, std::int64_t b, std::string_view what) {
  return checked_mul(a / std::gcd(a, b), b, what);
}

/// Returns the number of elements of a tensor. A zero-size dim wins over any
/// overflow.
inline std::int64_t numel_of(
    std::span<const std::int64_t> shape,
    std::string_view what) {
  for (const std::int64_t size : shape) {
    if (size == 0) {
      return 0;
    }
  }
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    numel = checked_mul(numel, size, what);
  }
  return numel;
}

}  // namespace flatshard::detail
