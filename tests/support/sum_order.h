// How far results may be apart that add the same numbers in another order.
// tests/python/sum_order.py has the same for Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace flatshard::testing {

/// The largest relative error of one rounding.
inline constexpr double kFloatRoundoff = 0x1p-24;
inline constexpr double kBFloat16Roundoff = 0x1p-8;

/// A result of sums. Ranks, microbatches, tiles and the vectors of a processor
/// (SSE, AVX2, AVX-512, AMX) choose their order.
struct Sums {
  /// Of the longest sum.
  std::int64_t addends = 1;
  /// Sums between the inputs and the result that follow each other. Each passes
  /// on the errors of those before it.
  int in_a_row = 1;
  /// The largest magnitude of a partial sum, in the unit of the tolerance: 1
  /// where the tolerance is relative to that magnitude.
  double size = 1;
  double roundoff = kFloatRoundoff;
};

/// Returns the number of sums in a row in a transformer's forward. A layer has
/// 13: two norms, the matmul with q, k or v, their norm, rotation, scores,
/// softmax, values, output, up, down, two residual additions. A final norm, the
/// logits and the loss follow. A backward has as many.
constexpr int sums_of_forward(std::int64_t layers) {
  return static_cast<int>(13 * layers + 3);
}

/// Returns the same number for `steps` steps of training, each a forward and a
/// backward. The weights hand the errors of a step to the next one.
constexpr int sums_of_steps(std::int64_t layers, int steps) {
  return 2 * sums_of_forward(layers) * steps;
}

/// Returns how many times the largest expected difference a tolerance is. The
/// variable FLATSHARD_TEST_MARGIN sets another value: a suite that passes with
/// 1 has the full margin left.
inline double sum_margin() {
  const char* const text = std::getenv("FLATSHARD_TEST_MARGIN");
  return text == nullptr ? 4 : std::atof(text);
}

/// Returns the largest difference of two results of such sums.
///
/// One addition is off by at most `roundoff` of its result, in either
/// direction. In the root mean square of all mantissas it is off by 0.4 of
/// that. So n additions are off by 0.4 * sqrt(n) * roundoff * size, and two
/// orders differ by 0.6 * sqrt(n) * roundoff * size. Sums in a row differ by
/// the root of their number more, when none of them grows the errors that it
/// gets. The largest difference of some ten thousand values is 4 times the root
/// mean square, hence 2.4.
///
/// A fault is larger: of 1000 addends in float32, a lost one is 55 times the
/// tolerance of one sum.
/// Source: Higham, Accuracy and Stability of Numerical Algorithms, 2.8 and 4.2.
inline double sum_tolerance(const Sums& sums) {
  return sum_margin() * 2.4 *
         std::sqrt(static_cast<double>(sums.in_a_row * sums.addends)) *
         sums.roundoff * sums.size;
}

}  // namespace flatshard::testing
