#pragma once

#include <cstdint>

#include "flatshard/core/float_arithmetic.h"
#include "flatshard/core/init_spec.h"
#include "flatshard/float8/formats.h"

/// The arithmetic of random initial values, without torch: CPUs and GPUs use
/// these functions, and their values are bitwise equal. Logarithm, sine and
/// cosine are series in double precision, because each library rounds its own
/// differently. They are within 0.51 units in the last place of float32.
namespace flatshard::draw {

using float_arithmetic::divide;
using float_arithmetic::plus;
using float_arithmetic::square_root;
using float_arithmetic::times;

/// Returns the logarithm.
/// @param x  in [2^-24, 1].
FLATSHARD_HOST_DEVICE inline float log_of(float x) {
  constexpr double kLog2 = 0.693147180559945309417;
  constexpr float kRoot2 = 1.41421356F;
  const std::uint32_t bits = float8::bits_of(x);
  int exponent = static_cast<int>(bits >> 23) - 127;
  float mantissa = float8::float_of((bits & 0x7fffffU) | 0x3f800000U);
  if (mantissa > kRoot2) {
    mantissa *= 0.5F;
    ++exponent;
  }
  // log(m) = 2 (s + s^3 / 3 + s^5 / 5 + ...) for s = (m - 1) / (m + 1).
  const double m = mantissa;
  const double s = divide(plus(m, -1.0), plus(m, 1.0));
  const double z = times(s, s);
  double sum = 1.0 / 13;
  sum = plus(times(sum, z), 1.0 / 11);
  sum = plus(times(sum, z), 1.0 / 9);
  sum = plus(times(sum, z), 1.0 / 7);
  sum = plus(times(sum, z), 1.0 / 5);
  sum = plus(times(sum, z), 1.0 / 3);
  sum = plus(times(sum, z), 1.0);
  const double log_m = times(times(2.0, s), sum);
  const double e = exponent;
  return static_cast<float>(plus(times(e, kLog2), log_m));
}

/// Computes cosine and sine.
/// @param angle  in [0, 2 pi].
FLATSHARD_HOST_DEVICE inline void
cos_sin(float angle, float& cosine, float& sine) {
  // pi / 2 = kQuarter + kRest.
  constexpr double kQuarter = 1.57079632679489661923;
  constexpr double kRest = 6.12323399573676588613e-17;
  const double a = angle;
  const int quarter = static_cast<int>(plus(times(a, 1.0 / kQuarter), 0.5));
  const double q = -quarter;
  const double r = plus(plus(a, times(q, kQuarter)), times(q, kRest));
  const double z = times(r, r);  // |r| <= pi / 4
  double s = -1.0 / 39916800;
  s = plus(times(s, z), 1.0 / 362880);
  s = plus(times(s, z), -1.0 / 5040);
  s = plus(times(s, z), 1.0 / 120);
  s = plus(times(s, z), -1.0 / 6);
  s = times(plus(times(s, z), 1.0), r);
  double c = -1.0 / 3628800;
  c = plus(times(c, z), 1.0 / 40320);
  c = plus(times(c, z), -1.0 / 720);
  c = plus(times(c, z), 1.0 / 24);
  c = plus(times(c, z), -1.0 / 2);
  c = plus(times(c, z), 1.0);
  const bool swaps = quarter % 2 != 0;
  const double x = swaps ? s : c;
  const double y = swaps ? c : s;
  cosine = static_cast<float>(quarter == 1 || quarter == 2 ? -x : x);
  sine = static_cast<float>(quarter == 2 || quarter == 3 ? -y : y);
}

/// Returns a word of Philox as a float in [0, 1) with 24 random bits.
FLATSHARD_HOST_DEVICE inline float uniform(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24F;
}

/// Computes the four values of a block of Philox.
/// @param spec  normal (Box-Muller) or uniform.
FLATSHARD_HOST_DEVICE inline void
values_of(const std::uint32_t* words, const InitSpec& spec, float* values) {
  constexpr float kTurn = 6.28318530717958647692F;
  if (spec.kind != InitSpec::Kind::normal) {
    for (int i = 0; i < 4; ++i) {
      values[i] =
          plus(spec.low, times(plus(spec.high, -spec.low), uniform(words[i])));
    }
    return;
  }
  for (int i = 0; i < 4; i += 2) {
    // 1 - u is in (0, 1]: the logarithm is finite.
    const float radius =
        square_root(times(-2.0F, log_of(1.0F - uniform(words[i]))));
    cos_sin(times(kTurn, uniform(words[i + 1])), values[i], values[i + 1]);
    for (int j = i; j < i + 2; ++j) {
      values[j] = plus(spec.mean, times(spec.stddev, times(radius, values[j])));
    }
  }
}

}  // namespace flatshard::draw
