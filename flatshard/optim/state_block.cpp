#include "flatshard/optim/state_block.h"

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

// As integers, the bits of magnitudes have the same order, and NaN is the
// largest.
std::uint32_t largest_of(const float* values) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    largest = std::max(largest, state_format::magnitude(values[i]));
  }
  return largest;
}

}  // namespace

__attribute__((optimize("O3", "no-math-errno"))) void decode_state_block(
    const void* codes,
    bool is_signed,
    std::int64_t first,
    float scale,
    float* to) {
  if (is_signed) {
    const auto* from = static_cast<const std::int8_t*>(codes) + first;
    for (std::int64_t i = 0; i < kStateBlock; ++i) {
      to[i] = state_format::decode_exp_avg(static_cast<float>(from[i]), scale);
    }
    return;
  }
  const auto* from = static_cast<const std::uint8_t*>(codes) + first;
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    to[i] = state_format::decode_exp_avg_sq(static_cast<float>(from[i]), scale);
  }
}

__attribute__((optimize("O3", "no-math-errno"))) float encode_state_block(
    const float* from,
    void* codes,
    bool is_signed,
    std::int64_t first) {
  auto* to = static_cast<std::uint8_t*>(codes) + first;
  if (is_signed) {
    const float scale = state_format::scale_of(largest_of(from));
    const float inverse = state_format::inverse_of(1.0F, scale);
    for (std::int64_t i = 0; i < kStateBlock; ++i) {
      to[i] = static_cast<std::uint8_t>(
          state_format::encode_exp_avg(from[i], inverse));
    }
    return scale;
  }
  float roots[kStateBlock];
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    roots[i] = std::sqrt(from[i]);
  }
  const float scale = state_format::float_of(largest_of(roots));
  const float inverse = state_format::inverse_of(255.0F, scale);
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    to[i] = static_cast<std::uint8_t>(
        state_format::encode_exp_avg_sq(roots[i], inverse));
  }
  return scale;
}

}  // namespace flatshard
