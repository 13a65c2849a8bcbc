#include "flatshard/data/permutation.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

namespace flatshard::data {
namespace {

TEST(Permutation, IsABijectionForEverySmallSize) {
  for (std::int64_t size = 1; size <= 300; ++size) {
    for (const std::uint64_t key : {0ULL, 1ULL, 0xFFFFFFFFFFFFFFFFULL}) {
      const Permutation permutation(key, size);
      std::vector<int> hits(static_cast<std::size_t>(size));
      for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t to = permutation(i);
        ASSERT_GE(to, 0);
        ASSERT_LT(to, size);
        ++hits[static_cast<std::size_t>(to)];
      }
      for (const int count : hits) {
        ASSERT_EQ(count, 1) << "size " << size << " key " << key;
      }
    }
  }
}

TEST(Permutation, IsABijectionBesidePowersOfTwo) {
  for (const std::int64_t size : {4095, 4096, 4097, 65535, 65537}) {
    const Permutation permutation(7, size);
    std::vector<bool> hit(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      const auto to = static_cast<std::size_t>(permutation(i));
      ASSERT_FALSE(hit.at(to));
      hit[to] = true;
    }
  }
}

TEST(Permutation, KeysGiveOtherOrders) {
  const Permutation a(1, 1000);
  const Permutation b(2, 1000);
  int same = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    same += a(i) == b(i) ? 1 : 0;
  }
  // Two random orders agree in one place on average; 20 has a chance below
  // 1e-18.
  EXPECT_LT(same, 20);
}

TEST(Permutation, SpreadsNeighbours) {
  constexpr std::int64_t kSize = 10000;
  const Permutation permutation(3, kSize);
  double sum = 0;
  for (std::int64_t i = 0; i + 1 < kSize; ++i) {
    sum += std::abs(static_cast<double>(permutation(i + 1) - permutation(i)));
  }
  // The mean distance of two random places is a third of the size. Its standard
  // error here is 0.25 %.
  EXPECT_NEAR(sum / (kSize - 1) / kSize, 1.0 / 3, 0.02);
}

TEST(Permutation, VeryLargeSizesStayInside) {
  constexpr std::int64_t kSize = (std::int64_t{1} << 62) - 3;
  const Permutation permutation(5, kSize);
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{1}, kSize - 1}) {
    EXPECT_LT(permutation(i), kSize);
    EXPECT_GE(permutation(i), 0);
  }
}

// The order is part of a run's reproducibility: it may not change unnoticed.
TEST(Permutation, GoldenValues) {
  const Permutation permutation(42, 10);
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < 10; ++i) {
    order.push_back(permutation(i));
  }
  EXPECT_EQ(order, (std::vector<std::int64_t>{6, 3, 7, 4, 8, 1, 0, 2, 5, 9}));
}

}  // namespace
}  // namespace flatshard::data
