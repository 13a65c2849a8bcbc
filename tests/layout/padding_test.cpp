#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "flatshard/layout/padding.h"
#include "tests/layout/expect_error.h"
#include "tests/layout/padding_cases.h"

namespace flatshard::padding {
namespace {

using ::testing::HasSubstr;

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
      const FlatLayout layout = layout_of(unit, Granularity::row(), ranks);
      EXPECT_LE(layout.padding_ratio(), row_bound(unit, ranks))
          << unit.name << " at " << ranks;
    }
  }
}

// A stack of experts is split at rows of its matrices, not between experts.
TEST(Padding, B60_StacksOfExpertsPadLittle) {
  for (const std::int64_t ranks : {8, 48, 512}) {
    const FlatLayout layout = FlatLayout::build(
        {{"up", {60, 2048, 1408}, Granularity::row()},
         {"down", {60, 1408, 2048}, Granularity::row()}},
        ranks);
    EXPECT_LT(layout.padding_ratio(), 0.01) << ranks << " ranks";
  }
}

constexpr std::int64_t kFloatNbytes = 4;

std::optional<std::string> describe(
    std::vector<TensorSpec> specs,
    std::int64_t num_shards,
    double max_padding = kDefaultMaxPadding,
    std::int64_t negligible_nbytes = 0) {
  const FlatLayout layout = FlatLayout::build(std::move(specs), num_shards);
  const FlatLayout* const layouts[] = {&layout};
  return describe_excessive_padding(
      layouts,
      max_padding,
      kFloatNbytes,
      negligible_nbytes);
}

// 64 rows over 96 ranks: 32 of them have only padding.
TEST(Padding, ExcessIsDescribedWithTheDegreeThatFits) {
  const std::vector<TensorSpec> specs = {{"a", {64, 1024}, Granularity::row()}};
  EXPECT_FALSE(describe(specs, 64));
  EXPECT_EQ(
      describe(specs, 96),
      "padding is 50.0 % of the model's parameters over 96 shards, 0 MiB per "
      "rank; max_padding allows 5.0 % (hardest to split: 'a' with granularity "
      "row, 1024 elements); shard over 32 ranks and replicate over 3 (HSDP), "
      "use a finer granularity, or raise max_padding");
  EXPECT_FALSE(describe(specs, 96, 0.5));
  const std::int64_t per_rank = 32 * 1024 / 96 * kFloatNbytes;
  EXPECT_TRUE(describe(specs, 96, kDefaultMaxPadding, per_rank - 4));
  EXPECT_FALSE(describe(specs, 96, kDefaultMaxPadding, per_rank));
}

TEST(Padding, ExcessNamesTheLargestWholeTensor) {
  const std::vector<TensorSpec> specs = {
      {"a", {900}, Granularity::tensor()},
      {"b", {1000}, Granularity::tensor()},
      {"c", {5}}};
  const std::string what = "'b' with granularity tensor, 1000 elements); ";
  EXPECT_THAT(
      describe(specs, 4, 0.1).value(),
      HasSubstr(what + "shard over 2 ranks and replicate over 2 (HSDP)"));
  EXPECT_THAT(
      describe(specs, 4, 0.01).value(),
      HasSubstr(what + "no smaller number of shards helps"));
}

TEST(Padding, ExcessHasTheNameThatATensorHasNow) {
  const FlatLayout layout =
      FlatLayout::build({{"weight", {3, 1024}, Granularity::row()}}, 2);
  const FlatLayout* const layouts[] = {&layout};
  const auto text = describe_excessive_padding(
      layouts,
      0.05,
      kFloatNbytes,
      0,
      [&](const FlatLayout& of, std::int64_t i) {
        EXPECT_EQ(&of, &layout);
        return "layers.7." + of.spec(i).name;
      });
  EXPECT_THAT(text.value(), HasSubstr("'layers.7.weight' with granularity"));
}

TEST(Padding, ExcessIsThatOfTheWholeModel) {
  const FlatLayout bad =
      FlatLayout::build({{"a", {3, 1024}, Granularity::row()}}, 2);
  const FlatLayout good =
      FlatLayout::build({{"b", {1024, 1024}, Granularity::row()}}, 2);
  const FlatLayout* const both[] = {&bad, &good};
  const FlatLayout* const alone[] = {&bad};
  EXPECT_TRUE(describe_excessive_padding(alone, 0.05, kFloatNbytes, 0));
  EXPECT_FALSE(describe_excessive_padding(both, 0.05, kFloatNbytes, 0));
}

// It would be a third of the parameters, and 5 KiB a rank.
TEST(Padding, AttentionOfDeepSeekIsAcceptedAt4096Ranks) {
  const FlatLayout layout =
      layout_of(padding_cases()[3], Granularity::row(), 4096);
  const FlatLayout* const layouts[] = {&layout};
  EXPECT_GT(layout.padding_ratio(), kDefaultMaxPadding);
  EXPECT_FALSE(describe_excessive_padding(layouts, kDefaultMaxPadding));
}

TEST(Padding, RefusesABadLimit) {
  for (const double bad : {-0.1, std::numeric_limits<double>::quiet_NaN()}) {
    expect_error(
        ErrorCode::config,
        "max_padding: expected a ratio of at least 0, got ",
        [&] { describe_excessive_padding({}, bad); });
  }
}

TEST(Padding, PerParameterPaddingOfKnownShapes) {
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{8, 3}, {4}}}, 4), 0.0);
  // 5 rows become 6: 10 elements on 60.
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{5, 10}, {10}}}, 2), 10.0 / 60);
  EXPECT_DOUBLE_EQ(per_parameter_padding({"", {{256, 2, 3}}}, 512), 1.0);
}

}  // namespace
}  // namespace flatshard::padding
