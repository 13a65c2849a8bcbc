#pragma once

#include <concepts>
#include <type_traits>

namespace flatshard {

/// Returns a / b, rounded up.
/// @param a  at least 0.
/// @param b  above 0.
template <std::integral A, std::integral B>
constexpr std::common_type_t<A, B> ceil_div(A a, B b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Returns the least multiple of `multiple` that is at least `n`.
template <std::integral N, std::integral M>
constexpr std::common_type_t<N, M> round_up(N n, M multiple) {
  return ceil_div(n, multiple) * multiple;
}

}  // namespace flatshard
