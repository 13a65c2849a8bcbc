#include <gtest/gtest.h>

#include "bench/padding_cases.h"
#include "tests/layout/expect_error.h"

namespace flatshard::bench {
namespace {

constexpr double kMaxElementPadding = 1e-3;

TEST(Padding, ElementModeStaysBelowATenthOfAPercent) {
  for (const PaddingCase& unit : padding_cases()) {
    for (const std::int64_t ranks : kPaddingRanks) {
      const FlatLayout layout =
          FlatLayout::build(unit.specs(Granularity::element()), ranks);
      EXPECT_LT(layout.padding_ratio(), kMaxElementPadding)
          << unit.name << " at " << ranks;
    }
  }
}

TEST(Padding, B59_RowSegmentsKeepTheirBound) {
  for (const PaddingCase& unit : padding_cases()) {
    for (const std::int64_t ranks : kPaddingRanks) {
      const FlatLayout layout =
          unlimited_layout(unit, Granularity::row(), ranks);
      EXPECT_LE(layout.padding_ratio(), row_bound(unit, ranks))
          << unit.name << " at " << ranks;
    }
  }
}

// A stack of experts is cut at the rows of its matrices, not between experts.
TEST(Padding, B60_StacksOfExpertsPadLittle) {
  for (const std::int64_t ranks : {8, 48, 512}) {
    const FlatLayout layout = FlatLayout::build(
        {{"up", {60, 2048, 1408}, Granularity::row()},
         {"down", {60, 1408, 2048}, Granularity::row()}},
        ranks);
    EXPECT_LT(layout.padding_ratio(), 0.01) << ranks << " ranks";
  }
}

TEST(Padding, AttentionOfDeepSeekIsRefusedAt4096RanksWithTheDegreeThatFits) {
  const PaddingCase mla = padding_cases()[3];
  EXPECT_NO_THROW(FlatLayout::build(mla.specs(Granularity::row()), 512));
  expect_error(
      ErrorCode::config,
      "over 4096 shards, max_padding allows 5.0 % (least divisible: "
      "'parameter6' with granularity row, 16384 elements); the largest degree "
      "that fits is 1024: shard over 1024 ranks and replicate over 4 (HSDP)",
      [&] { FlatLayout::build(mla.specs(Granularity::row()), 4096); });
}

TEST(Padding, PerParameterPaddingOfKnownShapes) {
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{8, 3}, {4}}}, 4), 0.0);
  // 5 rows become 6: 10 elements on 60.
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{5, 10}, {10}}}, 2), 10.0 / 60);
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{256, 2, 3}}}, 512), 1.0);
}

}  // namespace
}  // namespace flatshard::bench
