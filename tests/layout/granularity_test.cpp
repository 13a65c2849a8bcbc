#include "flatshard/layout/granularity.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/layout/expect_error.h"

namespace flatshard {
namespace {

using Shape = std::vector<std::int64_t>;

TEST(Granularity, RowWidth) {
  EXPECT_EQ(row_width(Shape{}), 1);
  EXPECT_EQ(row_width(Shape{7}), 1);
  EXPECT_EQ(row_width(Shape{4, 6}), 6);
  EXPECT_EQ(row_width(Shape{8, 4, 6}), 6);
  EXPECT_EQ(row_width(Shape{4, 0}), 1);
}

TEST(Granularity, GranuleNumel) {
  const Shape shape{8, 4, 6};
  EXPECT_EQ(Granularity().granule_numel(shape), 16);
  EXPECT_EQ(Granularity::element(5).granule_numel(shape), 5);
  EXPECT_EQ(Granularity::row().granule_numel(shape), 6);
  EXPECT_EQ(Granularity::block(3).granule_numel(shape), 18);
  EXPECT_EQ(Granularity::tensor().granule_numel(shape), 192);
  EXPECT_EQ(Granularity::tensor().granule_numel(Shape{}), 1);
  EXPECT_EQ(Granularity::tensor().granule_numel(Shape{3, 0}), 0);
}

TEST(Granularity, EqualityAndText) {
  EXPECT_EQ(Granularity(), Granularity::element(16));
  EXPECT_NE(Granularity::element(8), Granularity::element(16));
  EXPECT_NE(Granularity::row(), Granularity::block(1));
  EXPECT_EQ(Granularity::element(8).to_string(), "element(8)");
  EXPECT_EQ(Granularity::row().to_string(), "row");
  EXPECT_EQ(Granularity::block(128).to_string(), "block(128)");
  EXPECT_EQ(Granularity::tensor().to_string(), "tensor");
}

TEST(Granularity, RefusesSizesBelowOne) {
  expect_error(
      ErrorCode::usage,
      "Granularity::element expects n >= 1, got 0",
      [] { Granularity::element(0); });
  expect_error(
      ErrorCode::usage,
      "Granularity::block expects rows >= 1, got -2",
      [] { Granularity::block(-2); });
}

TEST(Granularity, RefusesOverflow) {
  expect_error(
      ErrorCode::config,
      "block(4611686018427387904): 4611686018427387904 * 2 elements do not fit "
      "64 bits",
      [] {
        Granularity::block(1LL << 62).granule_numel(Shape{1, 2});
      });
}

}  // namespace
}  // namespace flatshard
