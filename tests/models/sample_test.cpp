#include "flatshard/models/sample.h"

#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>

#include <set>

#include "flatshard/core/error.h"

namespace flatshard::models {
namespace {

// Prefers (last token + 1) % 10 by a wide margin, (last + 2) % 10 second.
at::Tensor counting(const at::Tensor& tokens) {
  const at::Tensor next = (tokens + 1).remainder(10);
  const at::Tensor second = (tokens + 2).remainder(10);
  return (at::one_hot(next, 10) * 9 + at::one_hot(second, 10) * 8)
      .to(at::kFloat);
}

at::Generator generator() {
  return at::make_generator<at::CPUGeneratorImpl>(1);
}

TEST(Sample, GreedyTakesTheLikeliestAndKeepsTheContextShort) {
  std::int64_t longest = 0;
  const auto fn = [&](const at::Tensor& tokens) {
    longest = std::max(longest, tokens.size(1));
    return counting(tokens);
  };
  const auto out = sample(
      fn,
      {5, 6, 7},
      at::kCPU,
      generator(),
      {.max_new_tokens = 5, .temperature = 0.0, .max_context = 4});
  EXPECT_EQ(out, (std::vector<std::int64_t>{8, 9, 0, 1, 2}));
  EXPECT_EQ(longest, 4);
}

TEST(Sample, StopsAfterTheStopToken) {
  const auto out = sample(
      counting,
      {5},
      at::kCPU,
      generator(),
      {.temperature = 0.0, .stop_tokens = {99, 8}});
  EXPECT_EQ(out, (std::vector<std::int64_t>{6, 7, 8}));
}

TEST(Sample, TopKDrawsAmongTheLikeliestAndRepeatsWithTheSeed) {
  const SampleOptions options{
      .max_new_tokens = 60,
      .temperature = 4.0,
      .top_k = 2};
  const auto out = sample(counting, {0}, at::kCPU, generator(), options);
  EXPECT_EQ(out, sample(counting, {0}, at::kCPU, generator(), options));
  std::int64_t last = 0;
  int seconds = 0;
  for (const std::int64_t token : out) {
    const std::int64_t step = (token - last + 10) % 10;
    EXPECT_TRUE(step == 1 || step == 2);
    seconds += step == 2;
    last = token;
  }
  EXPECT_GT(seconds, 0);
}

TEST(Sample, TopPDrawsAmongTheLikeliestThatAddUpToIt) {
  // Probabilities 0.5, 0.3, 0.2 of the tokens 2, 0, 1.
  const auto fn = [](const at::Tensor& tokens) {
    return at::tensor({0.3F, 0.2F, 0.5F}).log().expand({1, tokens.size(1), 3});
  };
  const auto drawn = [&](double top_p) {
    const auto out = sample(
        fn,
        {0},
        at::kCPU,
        generator(),
        {.max_new_tokens = 60, .top_p = top_p});
    return std::set<std::int64_t>(out.begin(), out.end());
  };
  EXPECT_EQ(drawn(0.01), (std::set<std::int64_t>{2}));
  EXPECT_EQ(drawn(0.49), (std::set<std::int64_t>{2}));
  EXPECT_EQ(drawn(0.6), (std::set<std::int64_t>{0, 2}));
  EXPECT_EQ(drawn(0.79), (std::set<std::int64_t>{0, 2}));
  EXPECT_EQ(drawn(0.9), (std::set<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(drawn(1.0), (std::set<std::int64_t>{0, 1, 2}));
}

TEST(Sample, RefusesBadOptions) {
  for (const double top_p : {0.0, -0.5, 1.5}) {
    EXPECT_THROW(
        sample(counting, {1}, at::kCPU, generator(), {.top_p = top_p}),
        Error);
  }
  EXPECT_THROW(sample(counting, {}, at::kCPU, generator()), Error);
  EXPECT_THROW(
      sample(counting, {1}, at::kCPU, generator(), {.temperature = -1.0}),
      Error);
}

}  // namespace
}  // namespace flatshard::models
