#include "flatshard/models/sample.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <vector>

#include "flatshard/core/error.h"

namespace flatshard::models {
namespace {

// Probabilities 0.3, 0.2, 0.5 of the tokens 0, 1, 2.
at::Tensor three_tokens(std::int64_t rows = 1) {
  return at::tensor({0.3F, 0.2F, 0.5F}).log().expand({rows, 3});
}

/// Returns how many of 1,000 evenly spaced numbers draw each token.
std::vector<int> drawn_shares(const SampleOptions& options) {
  std::vector<double> numbers;
  for (int i = 0; i < 1000; ++i) {
    numbers.push_back((i + 0.5) / 1000);
  }
  std::vector<int> counts(3);
  for (const std::int64_t token :
       draw_tokens(three_tokens(1000), numbers, options)) {
    ++counts.at(static_cast<std::size_t>(token));
  }
  return counts;
}

TEST(Sample, TemperatureZeroTakesTheLikeliestOfEachRow) {
  const at::Tensor logits =
      at::tensor({1.0F, 3.0F, 2.0F, 9.0F, 0.0F, 8.0F}).view({2, 3});
  EXPECT_EQ(
      draw_tokens(logits, {}, {.temperature = 0.0}),
      (std::vector<std::int64_t>{1, 0}));
}

TEST(Sample, DrawsByTheProbabilities) {
  EXPECT_EQ(drawn_shares({}), (std::vector<int>{300, 200, 500}));
  // sqrt(0.3), sqrt(0.2) and sqrt(0.5) are 0.322, 0.263 and 0.415 of their sum.
  EXPECT_EQ(
      drawn_shares({.temperature = 2.0}),
      (std::vector<int>{322, 263, 415}));
}

TEST(Sample, TopKDrawsAmongTheLikeliest) {
  EXPECT_EQ(drawn_shares({.top_k = 1}), (std::vector<int>{0, 0, 1000}));
  EXPECT_EQ(drawn_shares({.top_k = 2}), (std::vector<int>{375, 0, 625}));
  EXPECT_EQ(drawn_shares({.top_k = 7}), (std::vector<int>{300, 200, 500}));
}

TEST(Sample, TopPDrawsAmongTheLikeliestThatAddUpToIt) {
  EXPECT_EQ(drawn_shares({.top_p = 0.01}), (std::vector<int>{0, 0, 1000}));
  EXPECT_EQ(drawn_shares({.top_p = 0.49}), (std::vector<int>{0, 0, 1000}));
  EXPECT_EQ(drawn_shares({.top_p = 0.6}), (std::vector<int>{375, 0, 625}));
  EXPECT_EQ(drawn_shares({.top_p = 0.79}), (std::vector<int>{375, 0, 625}));
  EXPECT_EQ(drawn_shares({.top_p = 0.9}), (std::vector<int>{300, 200, 500}));
  // top_k keeps two, of which the first has 0.625.
  EXPECT_EQ(
      drawn_shares({.top_k = 2, .top_p = 0.6}),
      (std::vector<int>{0, 0, 1000}));
}

TEST(Sample, TheLargestNumberDrawsATokenOfTheVocabulary) {
  const at::Tensor logits = at::zeros({1, 100000}, at::kBFloat16);
  const double last = 1.0 - 1.0 / 4294967296.0;
  EXPECT_EQ(
      draw_tokens(logits, std::vector<double>{last}, {}),
      (std::vector<std::int64_t>{99999}));
  EXPECT_EQ(
      draw_tokens(logits, std::vector<double>{0.0}, {}),
      (std::vector<std::int64_t>{0}));
}

TEST(Sample, RefusesBadOptions) {
  for (const SampleOptions& options : std::vector<SampleOptions>{
           {.temperature = -1.0},
           {.top_k = -1},
           {.top_p = 0.0},
           {.top_p = -0.5},
           {.top_p = 1.5}}) {
    EXPECT_THROW(
        draw_tokens(three_tokens(), std::vector<double>{0.5}, options),
        Error);
  }
  EXPECT_THROW(
      draw_tokens(three_tokens(2), std::vector<double>{0.5}, {}),
      Error);
}

}  // namespace
}  // namespace flatshard::models
