#include "flatshard/schedule/overlap_price.h"

#include "tests/schedule/plan_shapes.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::PlanCase;

// Every exchange is shorter than the compute beside it.
NodeTimes node_times() {
  NodeTimes times;
  const auto set = [&](PlanNode node, double f, double b, double w) {
    times[{PlanPass::forward, node}] = f;
    times[{PlanPass::recompute, node}] = f;
    times[{PlanPass::backward, node}] = b;
    times[{PlanPass::wgrad, node}] = w;
  };
  set(PlanNode::embed, 1, 1, 0);
  set(PlanNode::attend, 4, 5, 3);
  set(PlanNode::dispatch, 2, 2, 0);
  set(PlanNode::shared, 1, 1, 1);
  set(PlanNode::experts, 3, 3, 3);
  set(PlanNode::combine, 2, 2, 0);
  set(PlanNode::merge, 0.5, 0.5, 0);
  set(PlanNode::head, 6, 6, 6);
  return times;
}

PlanPrice price_of(const PlanCase& c) {
  return price_plan(c.plan(), c.layers, c.options, node_times());
}

TEST(OverlapPrice, OneMicrobatchShowsAllOfItsExchanges) {
  const PlanCase c{4, 1, {}};
  const PlanPrice price = price_of(c);
  EXPECT_DOUBLE_EQ(price.exchange, 4 * 4 * 2);
  EXPECT_DOUBLE_EQ(price.exposed(), price.exchange);
  EXPECT_DOUBLE_EQ(price.compute, 2 + 18 + 4 * (4 + 8 + 3 + 6 + 0.5 + 0.5));
}

TEST(OverlapPrice, PairsHideWhatRunsBesideTheOtherMicrobatch) {
  for (const int microbatches : {2, 3, 8}) {
    const PlanCase c{6, microbatches, {}};
    // Only the first forward and the last backward have no partner.
    EXPECT_NEAR(price_of(c).exposed(), 6 * 4 * 2, 1e-9) << microbatches;
  }
}

TEST(OverlapPrice, DelayedWeightGradientsHideExchangesOfALoneBackward) {
  const PlanCase plain{6, 1, {}};
  const PlanCase delayed{6, 1, {.delay_wgrad = true}};
  EXPECT_DOUBLE_EQ(price_of(plain).compute, price_of(delayed).compute);
  EXPECT_DOUBLE_EQ(price_of(plain).exposed(), 6 * 4 * 2);
  // Dispatch's backward hides behind the experts' weights, and combine's behind
  // the attention's of the layer above, which the first has not.
  EXPECT_DOUBLE_EQ(price_of(delayed).exposed(), 6 * 2 * 2 + 2);
}

TEST(OverlapPrice, NothingIsFasterThanItsStreams) {
  for (const PlanCase& c : testing::plan_cases()) {
    if (c.layers > 5) {
      continue;
    }
    const auto plan = c.plan();
    const PlanPrice price = price_of(c);
    EXPECT_GE(price.total, std::max(price.compute, price.exchange)) << c.name();
    EXPECT_LE(price.total, price.compute + price.exchange + 1e-9) << c.name();
    ASSERT_EQ(price.spans.size(), plan.size());
    for (const PlanWait& wait : plan_waits(plan, c.layers, c.options)) {
      EXPECT_GE(price.spans[wait.waiter].begin, price.spans[wait.earlier].end);
    }
  }
}

TEST(OverlapPrice, InterleavingNeverCosts) {
  for (PlanCase c : testing::plan_cases()) {
    if (c.layers > 5 || c.options.in_flight == 1) {
      continue;
    }
    const double both = price_of(c).total;
    c.options.in_flight = 1;
    EXPECT_LE(both, price_of(c).total + 1e-9) << c.name();
  }
}

}  // namespace
}  // namespace flatshard
