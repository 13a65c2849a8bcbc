#include "tests/support/sum_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace flatshard::testing {
namespace {

using Values = std::vector<float>;

Values some_values(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  Values values(n);
  for (float& value : values) {
    value =
        static_cast<float>(random()) / static_cast<float>(random.max()) - 0.25F;
  }
  return values;
}

/// Adds in `lanes` partial sums, as a processor with vectors of that length.
float sum_in_lanes(const Values& values, std::size_t lanes) {
  Values sums(lanes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    sums[i % lanes] += values[i];
  }
  return std::accumulate(sums.begin(), sums.end(), 0.0F);
}

double size_of(const Values& values) {
  double size = 0;
  for (const float value : values) {
    size += std::abs(value);
  }
  return size;
}

TEST(SumOrder, HoldsForEveryOrderWithTheMarginLeft) {
  for (const std::size_t n : {2, 3, 7, 64, 1000, 20000}) {
    for (unsigned seed = 0; seed < 50; ++seed) {
      Values values = some_values(n, seed);
      const double bound = sum_tolerance(
                               {.addends = static_cast<std::int64_t>(n),
                                .size = size_of(values)}) /
                           sum_margin();
      const double first = sum_in_lanes(values, 1);
      for (const std::size_t lanes : {2, 4, 8, 16, 32}) {
        EXPECT_LE(std::abs(sum_in_lanes(values, lanes) - first), bound)
            << n << " addends in " << lanes << " lanes";
      }
      std::ranges::sort(values);
      EXPECT_LE(std::abs(sum_in_lanes(values, 1) - first), bound);
    }
  }
}

// tests/python/sum_order_test.py has them too.
TEST(SumOrder, HasTheValuesOfItsTwin) {
  EXPECT_NEAR(sum_tolerance({}) / sum_margin(), 1.430511e-07, 1e-13);
  EXPECT_NEAR(
      sum_tolerance({.addends = 64, .in_a_row = 36, .size = 0.5}) /
          sum_margin(),
      3.433228e-06,
      1e-12);
}

TEST(SumOrder, ALostAddendIsOutside) {
  for (const std::size_t n : {2, 64, 1000}) {
    Values values = some_values(n, 7);
    const Sums sums{
        .addends = static_cast<std::int64_t>(n),
        .in_a_row = 10,
        .size = size_of(values)};
    const double all = sum_in_lanes(values, 1);
    values.back() = 0;
    EXPECT_GT(std::abs(sum_in_lanes(values, 1) - all), sum_tolerance(sums));
  }
}

}  // namespace
}  // namespace flatshard::testing
