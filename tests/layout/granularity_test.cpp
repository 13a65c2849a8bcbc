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

TEST(Granularity, NamesAreOneForAllDoors) {
  const std::vector<std::int64_t> experts{4, 6, 8};
  EXPECT_EQ(Granularity::parse("element"), Granularity());
  EXPECT_EQ(Granularity::parse("row").granule_numel(experts), 8);
  EXPECT_EQ(Granularity::parse("dim0").granule_numel(experts), 48);
  EXPECT_EQ(Granularity::parse("block:3").granule_numel(experts), 24);
  EXPECT_EQ(Granularity::parse("tensor").granule_numel(experts), 192);
  EXPECT_EQ(Granularity::parse("chunk").granule_numel(experts), 48);
  EXPECT_EQ(Granularity::dim0().to_string(), "dim0");
  EXPECT_EQ(Granularity::chunk().to_string(), "chunk");
  for (const std::vector<std::int64_t>& one :
       {std::vector<std::int64_t>{}, {7}, {5, 0}}) {
    EXPECT_EQ(Granularity::dim0().granule_numel(one), 1);
  }
  for (const char* wrong : {"rows", "block:", "block:0", "block:2x", ""}) {
    expect_error(
        ErrorCode::config,
        "granularity expected element, row, dim0, block:N with N >= 1 rows, "
        "chunk, or tensor, got",
        [&] { Granularity::parse(wrong); });
  }
}

}  // namespace
}  // namespace flatshard
