#include "flatshard/layout/local_range.h"

#include <gtest/gtest.h>

#include "tests/layout/expect_error.h"
#include "tests/layout/placements.h"

namespace flatshard {
namespace {

using Sizes = std::vector<std::int64_t>;

using testing::kP;
using testing::kR;
using testing::kS;

FlatLayout two_segments(std::int64_t num_shards) {
  return FlatLayout::build(
      {{"a", {10, 32}, Granularity::row()}, {"b", {4, 48}, Granularity::row()}},
      num_shards);
}

TEST(ShardSpan, InnermostAxisIsCutFirst) {
  const Sizes sizes{2, 3};  // outer, inner
  for (std::int64_t outer = 0; outer < 2; ++outer) {
    for (std::int64_t inner = 0; inner < 3; ++inner) {
      const Sizes at{outer, inner};
      EXPECT_EQ(
          shard_span(6, {kS, kS}, sizes, at),
          (ShardSpan{inner * 2 + outer, 1}));
      EXPECT_EQ(shard_span(6, {kR, kS}, sizes, at), (ShardSpan{inner * 2, 2}));
      EXPECT_EQ(shard_span(6, {kP, kS}, sizes, at), (ShardSpan{inner * 2, 2}));
      EXPECT_EQ(shard_span(6, {kR, kR}, sizes, at), (ShardSpan{0, 6}));
      EXPECT_EQ(shard_span(3, {kR, kS}, sizes, at), (ShardSpan{inner, 1}));
    }
  }
}

TEST(ShardSpan, GatheringTheOuterAxesGivesTheInnerShard) {
  const Sizes sizes{2, 3, 4};
  for (std::int64_t middle = 0; middle < 3; ++middle) {
    for (std::int64_t inner = 0; inner < 4; ++inner) {
      const ShardSpan whole =
          shard_span(24, {kR, kS, kS}, sizes, Sizes{0, middle, inner});
      for (std::int64_t outer = 0; outer < 2; ++outer) {
        EXPECT_EQ(
            shard_span(24, {kS, kS, kS}, sizes, Sizes{outer, middle, inner}),
            (ShardSpan{whole.first + outer, 1}));
      }
      EXPECT_EQ(whole.count, 2);
      const ShardSpan wider =
          shard_span(24, {kR, kR, kS}, sizes, Sizes{0, middle, inner});
      EXPECT_EQ(wider, (ShardSpan{inner * 6, 6}));
      EXPECT_EQ(whole.first, wider.first + 2 * middle);
    }
  }
}

TEST(LocalRange, OfOneSegment) {
  const FlatLayout layout = FlatLayout::build({{"a", {100}}}, 4);
  ASSERT_EQ(layout.numel(), 128);
  const Sizes sizes{2, 2};
  const Sizes at{1, 0};
  const auto range = [&](const Placements& placements) {
    return local_ranges(layout, placements, sizes, at).at(0);
  };
  EXPECT_EQ(range({kS, kS}), (LocalRange{32, 0, 32}));
  EXPECT_EQ(range({kR, kS}), (LocalRange{0, 0, 64}));
  EXPECT_EQ(range({kR, kP}), (LocalRange{0, 0, 128}));
  EXPECT_EQ(local_numel(layout, {kS, kS}, sizes), 32);
  EXPECT_EQ(local_numel(layout, {kR, kS}, sizes), 64);
  EXPECT_EQ(local_numel(layout, {kP, kR}, sizes), 128);
}

TEST(LocalRange, OfTwoSegments) {
  const FlatLayout layout = two_segments(4);
  ASSERT_EQ(layout.segments().size(), 2u);
  ASSERT_EQ(layout.segments()[0].shard_numel, 96);
  ASSERT_EQ(layout.segments()[1].shard_numel, 48);
  const Sizes sizes{2, 2};
  EXPECT_EQ(
      local_ranges(layout, {kS, kS}, sizes, Sizes{1, 0}),
      (std::vector<LocalRange>{{96, 0, 96}, {432, 96, 48}}));
  EXPECT_EQ(
      local_ranges(layout, {kR, kS}, sizes, Sizes{0, 1}),
      (std::vector<LocalRange>{{192, 0, 192}, {480, 192, 96}}));
  EXPECT_EQ(local_numel(layout, {kR, kS}, sizes), 288);
}

TEST(LocalRange, RefusesWhatDoesNotFit) {
  const FlatLayout layout = two_segments(4);
  const Sizes sizes{2, 2};
  const auto ranges = [&](Placements placements, Sizes sizes, Sizes at) {
    return [=, &layout] { local_ranges(layout, placements, sizes, at); };
  };
  expect_error(
      ErrorCode::usage,
      "expected one placement per mesh axis, got 1 for 2 axes",
      ranges({kS}, sizes, {0, 0}));
  expect_error(
      ErrorCode::usage,
      "expected one coordinate per mesh axis, got 1 for 2 axes",
      ranges({kS, kS}, sizes, {0}));
  expect_error(
      ErrorCode::usage,
      "placements [Shard, Replicate]: expected the sharded axes to be the "
      "innermost ones",
      ranges({kS, kR}, sizes, {0, 0}));
  expect_error(
      ErrorCode::usage,
      "mesh axis 1 has size 0",
      ranges({kR, kS}, {2, 0}, {0, 0}));
  expect_error(
      ErrorCode::usage,
      "coordinate 2 on mesh axis 1 is out of range, its size is 2",
      ranges({kR, kS}, sizes, {0, 2}));
  expect_error(
      ErrorCode::usage,
      "coordinate -1 on mesh axis 0 is out of range",
      ranges({kR, kS}, sizes, {-1, 0}));
  expect_error(
      ErrorCode::usage,
      "a layout of 4 shards cannot be split into 9 equal parts",
      ranges({kS, kS}, {3, 3}, {0, 0}));
}

}  // namespace
}  // namespace flatshard
