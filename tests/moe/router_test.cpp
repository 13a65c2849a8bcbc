#include "flatshard/moe/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "router_oracle.h"
#include "tests/nn/check.h"
#include "tests/support/sum_order.h"

namespace flatshard::nn {
namespace {

using ::testing::HasSubstr;

// Sums of at most 16 exponentials, forward and backward, each of two: of all
// scores and of the chosen ones.
const double kTolerance =
    testing::sum_tolerance({.addends = 16, .in_a_row = 2 * 2});

at::Tensor ints(std::vector<std::int32_t> values) {
  return at::tensor(values, at::kInt);
}

class Routers : public ::testing::TestWithParam<std::size_t> {
 protected:
  RouterOptions options() const { return router_rules()[GetParam()]; }
};

INSTANTIATE_TEST_SUITE_P(
    Rules,
    Routers,
    ::testing::Range<std::size_t>(0, router_rules().size()));

TEST_P(Routers, MatchTheOracleInChoiceWeightsAndGradients) {
  const RouterOptions o = options();
  for (const bool biased : {false, true}) {
    const at::Tensor logits =
        (at::randn({37, 16}, seeded(3)) * 2).requires_grad_();
    const at::Tensor bias =
        biased ? at::randn({16}, seeded(4)) * 0.3 : at::Tensor();
    const at::Tensor exact = logits.detach().to(at::kDouble).requires_grad_();
    const at::Tensor dweights = at::randn({37, o.experts_per_token}, seeded(5));

    const Routing routing = route(logits, bias, o);
    const at::Tensor scores = oracle_scores(exact, o);
    const at::Tensor experts = oracle_experts(scores, bias, o);
    EXPECT_TRUE(at::equal(routing.experts, experts.to(at::kInt)));
    EXPECT_TRUE(at::equal(
        routing.counts,
        at::bincount(experts.flatten(), {}, 16).to(at::kInt)));
    const at::Tensor weights = oracle_weights(scores, experts, o);
    EXPECT_LE(relative_error(routing.weights, weights), kTolerance);

    routing.weights.backward(dweights);
    at::Tensor loss = (weights * dweights.to(at::kDouble)).sum();
    (loss + oracle_losses(exact, routing.counts, o)).backward();
    EXPECT_LE(relative_error(logits.grad(), exact.grad()), kTolerance);
    EXPECT_NEAR(
        load_balance(logits, routing.counts, o).item<double>(),
        oracle_losses(
            exact,
            routing.counts,
            {.experts_per_token = o.experts_per_token,
             .score = o.score,
             .aux_loss = 1.0})
            .item<double>(),
        testing::sum_tolerance({.addends = 37 * 16}));
  }
}

TEST(Router, TheLowestIndexWinsTies) {
  const Routing routing =
      route(at::zeros({5, 6}), {}, {.experts_per_token = 3});
  for (std::int64_t t = 0; t < 5; ++t) {
    EXPECT_TRUE(at::equal(routing.experts[t], ints({0, 1, 2})));
  }
  EXPECT_TRUE(at::equal(routing.counts, ints({5, 5, 5, 0, 0, 0})));
  const Routing grouped = route(
      at::zeros({1, 6}),
      {},
      {.experts_per_token = 3, .groups = 3, .kept_groups = 2});
  EXPECT_TRUE(at::equal(grouped.experts[0], ints({0, 1, 2})));
}

TEST(Router, TheBiasChoosesAndDoesNotWeigh) {
  const at::Tensor logits = at::tensor({2.0F, 1.0F, 0.0F, -1.0F}).view({1, 4});
  const Routing routing = route(
      logits,
      at::tensor({0.0F, 0.0F, 0.0F, 5.0F}),
      {.experts_per_token = 2,
       .score = RouterScore::sigmoid,
       .normalize = false});
  EXPECT_TRUE(at::equal(routing.experts, ints({3, 0}).view({1, 2})));
  EXPECT_TRUE(at::allclose(
      routing.weights,
      at::sigmoid(at::tensor({-1.0F, 2.0F})).view({1, 2})));
}

TEST(Router, M4_AGroupThatIsLeftOutIsNotChosenForAScoreBelowZero) {
  // The first group is kept, although its second expert is the worst of all.
  // Every score + bias is below zero.
  const at::Tensor bias = at::tensor({-1.0F, -5.0F, -3.5F, -3.5F});
  const Routing routing = route(
      at::zeros({1, 4}),
      bias,
      {.experts_per_token = 2,
       .score = RouterScore::sigmoid,
       .groups = 2,
       .kept_groups = 1});
  EXPECT_TRUE(at::equal(routing.experts, ints({0, 1}).view({1, 2})));
}

TEST(Router, ANanChoosesDifferentExpertsAndShowsInTheWeights) {
  const at::Tensor logits = at::full({3, 4}, std::nan(""), at::kFloat);
  const Routing routing = route(logits, {}, {.experts_per_token = 2});
  EXPECT_TRUE(at::equal(routing.counts, ints({3, 3, 0, 0})));
  EXPECT_TRUE(routing.weights.isnan().all().item<bool>());
}

TEST(Router, AChoiceThatIsGivenIsTakenAndWeighedAnew) {
  const RouterOptions options{.experts_per_token = 2};
  const at::Tensor before = at::randn({9, 5}, seeded(1));
  const Routing first = route(before, {}, options);
  // Other logits would choose otherwise.
  const at::Tensor after = (-before).requires_grad_();
  const Routing again = route(after, {}, options, {.chosen = &first});
  EXPECT_TRUE(at::equal(again.experts, first.experts));
  EXPECT_TRUE(at::equal(again.counts, first.counts));
  const at::Tensor want = oracle_weights(
      oracle_scores(after.detach().to(at::kDouble), options),
      first.experts.to(at::kLong),
      options);
  EXPECT_LE(relative_error(again.weights, want), kTolerance);
}

TEST(Router, M2_AuxiliaryLossesFollowTheLosssGradient) {
  const RouterOptions options{
      .experts_per_token = 2,
      .aux_loss = 0.5,
      .z_loss = 0.25};
  const at::Tensor base = at::randn({8, 4}, seeded(2));
  const auto gradient = [&](double divisor) {
    const at::Tensor logits = base.clone().requires_grad_();
    const auto told = c10::make_intrusive<LossGradient>();
    const Routing routing = route(logits, {}, options, {.loss_gradient = told});
    // The weights count for nothing: what is left is of the two losses.
    const at::Tensor loss =
        tell_gradient((routing.weights * 0).sum(), told) / divisor;
    loss.backward();
    return logits.grad();
  };
  EXPECT_GT(gradient(1).abs().max().item<double>(), 0);
  EXPECT_TRUE(at::allclose(gradient(4) * 4, gradient(1), 1e-6, 1e-9));
}

// Padding has no effect: the losses, the counts and the remaining choices are
// the same as with only the other tokens.
TEST_P(Routers, LeaveOutPadding) {
  const RouterOptions o = options();
  const at::Tensor logits =
      (at::randn({37, 16}, seeded(3)) * 2).requires_grad_();
  const at::Tensor padding = at::rand({37}, seeded(9)).lt(0.4);
  const at::Tensor tokens = padding.logical_not().nonzero().squeeze(1);
  const at::Tensor alone =
      logits.detach().index_select(0, tokens).requires_grad_();
  // Padding has no rows, so its weights receive no gradient.
  const at::Tensor dweights = at::randn({37, o.experts_per_token}, seeded(5))
                                  .masked_fill(padding.unsqueeze(1), 0.0);

  const Routing got = route(logits, {}, o, {.padding = padding});
  const Routing want = route(alone, {}, o);
  EXPECT_TRUE(at::equal(got.counts, want.counts));
  got.weights.backward(dweights);
  want.weights.backward(dweights.index_select(0, tokens));
  EXPECT_LE(
      relative_error(
          logits.grad().index_select(0, tokens),
          alone.grad().to(at::kDouble)),
      kTolerance);
  EXPECT_EQ(
      logits.grad()
          .masked_select(padding.unsqueeze(1))
          .abs()
          .max()
          .item<double>(),
      0);
  EXPECT_NEAR(
      load_balance(logits, got.counts, o, padding).item<double>(),
      load_balance(alone, want.counts, o).item<double>(),
      1e-6);

  const Routing kept =
      drop_beyond_capacity(drop_padding(got, padding), 0.75, /*drops=*/true);
  const Routing kept_alone = drop_beyond_capacity(want, 0.75);
  EXPECT_TRUE(at::equal(kept.counts, kept_alone.counts));
  EXPECT_TRUE(
      at::equal(kept.experts.index_select(0, tokens), kept_alone.experts));
  EXPECT_TRUE(kept.experts.masked_select(padding.unsqueeze(1))
                  .eq(16)
                  .all()
                  .item<bool>());
}

TEST(Router, CapacityKeepsTheHeaviestTokensOfAnExpert) {
  const Routing routing{
      .experts = ints({0, 1, 0, 1, 0, 2, 0, 1}).view({4, 2}),
      .weights =
          at::tensor({.5F, .5F, .9F, .1F, .5F, .5F, .7F, .3F}).view({4, 2}),
      .counts = ints({4, 3, 1})};
  const Routing left = drop_beyond_capacity(routing, /*factor=*/0.75);
  // Expert 0: 0.9 and 0.7 stay; expert 1: 0.5 and 0.3.
  EXPECT_TRUE(
      at::equal(left.experts, ints({3, 1, 0, 3, 3, 2, 0, 1}).view({4, 2})));
  EXPECT_TRUE(at::equal(left.counts, ints({2, 2, 1})));
  EXPECT_TRUE(at::equal(left.weights, routing.weights));
  // Among equal weights the earlier token stays.
  const Routing tie{
      .experts = ints({0, 0, 0}).view({3, 1}),
      .weights = at::ones({3, 1}),
      .counts = ints({3})};
  EXPECT_TRUE(at::equal(
      drop_beyond_capacity(tie, /*factor=*/0.6).experts,
      ints({0, 0, 1}).view({3, 1})));
}

TEST(Router, BalancedChoicesDifferByOneAtMost) {
  const Routing even = balanced_choice(8, 4, 2, at::kCPU);
  EXPECT_TRUE(at::equal(even.counts, ints({4, 4, 4, 4})));
  const Routing odd = balanced_choice(5, 3, 2, at::kCPU);
  EXPECT_TRUE(at::equal(odd.counts, ints({4, 3, 3})));
  EXPECT_TRUE(at::equal(
      at::bincount(odd.experts.flatten(), {}, 3).to(at::kInt),
      odd.counts));
}

TEST(Router, ManyExpertsAndOneToken) {
  const RouterOptions options{.experts_per_token = 6};
  const at::Tensor logits = at::randn({1, 1000}, seeded(8));
  const Routing routing = route(logits, {}, options);
  EXPECT_TRUE(
      at::equal(routing.experts.to(at::kLong), std::get<1>(logits.topk(6))));
  EXPECT_EQ(route(at::empty({0, 8}), {}, options).experts.size(0), 0);
}

std::string refusal(const RouterOptions& options, std::int64_t num_experts) {
  try {
    options.check(num_experts);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    return error.message();
  }
  return "nothing";
}

TEST(Router, RefusesWhatCannotBeChosen) {
  EXPECT_EQ(
      refusal({.experts_per_token = 5}, 4),
      "experts_per_token: expected 1 to num_experts = 4, got 5");
  EXPECT_EQ(
      refusal({.experts_per_token = 1, .groups = 3}, 4),
      "router_groups: expected a divisor of num_experts = 4, got 3");
  EXPECT_EQ(
      refusal({.experts_per_token = 1, .groups = 2, .kept_groups = 3}, 4),
      "router_kept_groups: expected 1 to router_groups = 2, got 3");
  EXPECT_EQ(
      refusal({.experts_per_token = 3, .groups = 2, .kept_groups = 1}, 4),
      "experts_per_token: expected at most the 2 experts of 1 of 2 groups, got "
      "3");
  EXPECT_THAT(
      refusal({.experts_per_token = 1, .aux_loss = -1}, 4),
      HasSubstr("aux_loss and z_loss"));
  EXPECT_THROW(route(at::zeros({2, 3}, at::kDouble), {}, {}), Error);
  EXPECT_THROW(route(at::zeros({2, 3}), at::zeros({2}), {}), Error);
  EXPECT_THROW(
      route(at::zeros({2, 3}), {}, {}, {.padding = at::zeros({3}, at::kBool)}),
      Error);
}

}  // namespace
}  // namespace flatshard::nn
