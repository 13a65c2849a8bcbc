#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"
#include "tests/schedule/plan_shapes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

namespace flatshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::PlanCase;

std::string text_of(int layers, int microbatches, OverlapPlanOptions options) {
  return to_string(overlap_plan(layers, microbatches, options));
}

TEST(OverlapPlan, TwoLayersAndThreeMicrobatches) {
  EXPECT_EQ(
      text_of(2, 3, {}),
      "F0.embed F0.attend(0) F0.dispatch(0) F0.experts(0) F0.combine(0) "
      "F0.merge(0) F0.attend(1) F0.dispatch(1) F0.experts(1) F0.combine(1) "
      "F0.merge(1) F0.head "
      // B0 and F1
      "F1.embed B0.head "
      "B0.merge(1) B0.combine(1) F1.attend(0) B0.experts(1) "
      "F1.dispatch(0) F1.experts(0) B0.dispatch(1) F1.combine(0) B0.attend(1) "
      "B0.merge(0) B0.combine(0) F1.merge(0) F1.attend(1) B0.experts(0) "
      "F1.dispatch(1) F1.experts(1) B0.dispatch(0) F1.combine(1) B0.attend(0) "
      "B0.embed F1.merge(1) F1.head "
      // B1 and F2
      "F2.embed B1.head "
      "B1.merge(1) B1.combine(1) F2.attend(0) B1.experts(1) "
      "F2.dispatch(0) F2.experts(0) B1.dispatch(1) F2.combine(0) B1.attend(1) "
      "B1.merge(0) B1.combine(0) F2.merge(0) F2.attend(1) B1.experts(0) "
      "F2.dispatch(1) F2.experts(1) B1.dispatch(0) F2.combine(1) B1.attend(0) "
      "B1.embed F2.merge(1) F2.head "
      // B2
      "B2.head B2.merge(1) B2.combine(1) B2.experts(1) B2.dispatch(1) "
      "B2.attend(1) B2.merge(0) B2.combine(0) B2.experts(0) B2.dispatch(0) "
      "B2.attend(0) B2.embed");
}

TEST(OverlapPlan, ThreeInFlightRunTheFirstForwardsInAPair) {
  EXPECT_EQ(
      text_of(1, 3, {.in_flight = 3}),
      "F0.embed F1.embed F0.attend(0) F1.attend(0) F0.dispatch(0) "
      "F0.experts(0) F1.dispatch(0) F0.combine(0) F1.experts(0) F1.combine(0) "
      "F0.merge(0) F0.head F1.merge(0) F1.head "
      // B0 and F2
      "F2.embed B0.head B0.merge(0) B0.combine(0) F2.attend(0) B0.experts(0) "
      "F2.dispatch(0) F2.experts(0) B0.dispatch(0) F2.combine(0) B0.attend(0) "
      "B0.embed F2.merge(0) F2.head "
      "B1.head B1.merge(0) B1.combine(0) B1.experts(0) B1.dispatch(0) "
      "B1.attend(0) B1.embed "
      "B2.head B2.merge(0) B2.combine(0) B2.experts(0) B2.dispatch(0) "
      "B2.attend(0) B2.embed");
}

TEST(OverlapPlan, OneLayerWithEverything) {
  EXPECT_EQ(
      text_of(
          1,
          2,
          {.delay_wgrad = true, .recompute = true, .shared_experts = true}),
      "F0.embed F0.attend(0) F0.dispatch(0) F0.shared(0) F0.experts(0) "
      "F0.combine(0) F0.merge(0) F0.head "
      "F1.embed B0.head B0.merge(0) B0.combine(0) R0.attend(0) R0.dispatch(0) "
      "R0.shared(0) B0.shared(0) F1.attend(0) R0.experts(0) B0.experts(0) "
      "F1.dispatch(0) W0.experts(0) F1.shared(0) F1.experts(0) B0.dispatch(0) "
      "F1.combine(0) B0.attend(0) W0.attend(0) W0.shared(0) B0.embed "
      "F1.merge(0) F1.head "
      "B1.head B1.merge(0) B1.combine(0) R1.attend(0) R1.dispatch(0) "
      "R1.shared(0) B1.shared(0) R1.experts(0) B1.experts(0) B1.dispatch(0) "
      "W1.experts(0) B1.attend(0) W1.attend(0) W1.shared(0) B1.embed");
}

TEST(OverlapPlan, WithoutInterleavingWeightGradientsHideTheBackwardsRows) {
  const auto plan = overlap_plan(
      2,
      2,
      {.in_flight = 1, .delay_wgrad = true, .dense = {true, false}});
  EXPECT_EQ(
      to_string({plan.begin(), plan.begin() + plan.size() / 2}),
      "F0.embed F0.attend(0) F0.attend(1) F0.dispatch(1) F0.experts(1) "
      "F0.combine(1) F0.merge(1) F0.head "
      "B0.head B0.merge(1) B0.combine(1) B0.experts(1) B0.dispatch(1) "
      "W0.experts(1) B0.attend(1) W0.attend(1) B0.attend(0) W0.attend(0) "
      "B0.embed");
}

TEST(OverlapPlan, P6_EveryPlanKeepsToItsDependencies) {
  for (const PlanCase& c : testing::plan_cases()) {
    EXPECT_NO_THROW(check_plan(c.plan(), c.layers, c.microbatches, c.options))
        << c.name();
  }
}

TEST(OverlapPlan, AllForwardsBeforeTheFirstBackwardAreInPairsButTheLast) {
  const auto firsts = [](int microbatches, int in_flight) {
    std::vector<int> firsts;
    for (int m = 0; m < microbatches; ++m) {
      if (is_first_of_pair(m, microbatches, {.in_flight = in_flight})) {
        firsts.push_back(m);
      }
    }
    return firsts;
  };
  EXPECT_THAT(firsts(8, 1), ElementsAre());
  EXPECT_THAT(firsts(8, 2), ElementsAre());
  EXPECT_THAT(firsts(8, 3), ElementsAre(0));
  EXPECT_THAT(firsts(8, 4), ElementsAre(0));
  EXPECT_THAT(firsts(8, 5), ElementsAre(0, 2));
  EXPECT_THAT(firsts(2, 3), ElementsAre());  // the second meets a backward
}

// Returns the largest number of (microbatch, layer) whose activations are alive
// at once: from a layer's first step of the forward, or of the recompute, to
// its last step of backward or weight gradient.
int peak_layers(const std::vector<PlanStep>& plan, bool recompute) {
  // Change of the number alive at each position.
  std::map<std::tuple<int, int, bool>, std::array<int, 2>> lives;
  for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
    const PlanStep& step = plan[i];
    if (step.layer < 0) {
      continue;
    }
    const bool only_forward = recompute && step.pass == PlanPass::forward;
    auto [life, is_new] = lives.try_emplace(
        {step.microbatch, step.layer, only_forward},
        std::array<int, 2>{i, i});
    life->second[1] = i;
  }
  std::vector<int> change(plan.size() + 1, 0);
  for (const auto& [key, life] : lives) {
    ++change[life[0]];
    --change[life[1] + 1];
  }
  int alive = 0;
  int peak = 0;
  for (const int delta : change) {
    alive += delta;
    peak = std::max(peak, alive);
  }
  return peak;
}

TEST(OverlapPlan, HoldsTheMicrobatchesInFlightAndOneLayer) {
  for (const PlanCase& c : testing::plan_cases()) {
    const int in_flight = std::min(c.options.in_flight, c.microbatches);
    const bool both = in_flight > 1;
    // A forward runs ahead of the backward that frees its layer. One layer is
    // recomputed at a time, and the weight gradients of one are late.
    const int saved =
        c.options.recompute ? 1 : c.layers * std::max(1, in_flight - 1);
    const int more = both || (c.options.recompute && c.options.delay_wgrad);
    const int peak = peak_layers(c.plan(), c.options.recompute);
    EXPECT_LE(peak, saved + more) << c.name();
    if (c.layers > 2) {
      EXPECT_EQ(peak, saved + more) << c.name();
    }
  }
}

TEST(OverlapPlan, PlansThatAreWrongAreNamed) {
  const OverlapPlanOptions options{.delay_wgrad = true, .recompute = true};
  const auto plan = overlap_plan(2, 3, options);
  const auto message = [](const std::vector<PlanStep>& wrong,
                          const OverlapPlanOptions& allowed) -> std::string {
    try {
      check_plan(wrong, 2, 3, allowed);
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  };
  ASSERT_EQ(message(plan, options), "");
  for (std::size_t i = 0; i < plan.size(); ++i) {
    auto wrong = plan;
    wrong.erase(wrong.begin() + i);
    EXPECT_THAT(
        message(wrong, options),
        HasSubstr("lacks " + to_string(plan[i])));
    wrong = plan;
    wrong.push_back(plan[i]);
    EXPECT_THAT(
        message(wrong, options),
        HasSubstr(to_string(plan[i]) + " twice"));
  }
  // A step in front of what it depends on.
  for (const PlanStep& step : plan) {
    for (const PlanStep& earlier : plan_dependencies(step, 2, options)) {
      auto wrong = plan;
      std::erase(wrong, step);
      wrong.insert(std::find(wrong.begin(), wrong.end(), earlier), step);
      EXPECT_NE(message(wrong, options), "")
          << to_string(step) << " before " << to_string(earlier);
    }
  }
  // More in flight than the options allow, and a pair that is none.
  OverlapPlanOptions more = options;
  more.in_flight = 3;
  EXPECT_THAT(
      message(overlap_plan(2, 3, more), options),
      HasSubstr("F1.embed before its dependency F0.head"));
  EXPECT_THAT(
      message(plan, more),
      HasSubstr("F0.attend(0) before its dependency F1.embed"));
  // The second forward sends its rows before the first one. The counts were
  // sent in the other order.
  auto sent = overlap_plan(2, 3, more);
  const auto dispatch_of = [&](int microbatch) {
    return std::ranges::find(
        sent,
        PlanStep{PlanPass::forward, microbatch, 0, PlanNode::dispatch});
  };
  const PlanStep second = *dispatch_of(1);
  sent.erase(dispatch_of(1));
  sent.insert(dispatch_of(0), second);
  EXPECT_THAT(
      message(sent, more),
      HasSubstr("F1.dispatch(0) before the dispatch of F0.attend(0)"));
  auto unknown = plan;
  unknown.push_back({PlanPass::forward, 0, 2, PlanNode::attend});
  EXPECT_THAT(
      message(unknown, options),
      HasSubstr("expected 102 steps, got 103"));
}

// Returns whether the waits and the order of each stream lead from every step
// to what it depends on.
bool proves_dependencies(
    const PlanCase& c,
    const std::vector<PlanStep>& plan,
    const std::vector<PlanWait>& waits) {
  std::vector<std::set<int>> known(plan.size());  // what is over by then
  std::map<PlanStream, int> last;
  for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
    const auto after = [&](int earlier) {
      known[i].insert(earlier);
      known[i].insert(known[earlier].begin(), known[earlier].end());
    };
    if (last.contains(plan[i].stream())) {
      after(last[plan[i].stream()]);
    }
    for (const PlanWait& wait : waits) {
      if (wait.waiter == i) {
        after(wait.earlier);
      }
    }
    last[plan[i].stream()] = i;
    for (const PlanStep& d : plan_dependencies(plan[i], c.layers, c.options)) {
      const int at = static_cast<int>(
          std::find(plan.begin(), plan.end(), d) - plan.begin());
      if (!known[i].contains(at)) {
        return false;
      }
    }
  }
  return true;
}

TEST(OverlapPlan, NoWaitCanBeLeftOut) {
  for (const PlanCase& c : testing::plan_cases()) {
    if (c.layers > 3 || c.microbatches > 3) {
      continue;
    }
    const auto plan = c.plan();
    const auto waits = plan_waits(plan, c.layers, c.options);
    EXPECT_TRUE(proves_dependencies(c, plan, waits)) << c.name();
    if (c.layers > 2) {
      continue;
    }
    for (std::size_t i = 0; i < waits.size(); ++i) {
      auto fewer = waits;
      fewer.erase(fewer.begin() + i);
      EXPECT_FALSE(proves_dependencies(c, plan, fewer))
          << c.name() << ": " << to_string(plan[waits[i].waiter])
          << " need not wait for " << to_string(plan[waits[i].earlier]);
    }
  }
}

TEST(OverlapPlan, BadShapesAreRefused) {
  EXPECT_THROW(overlap_plan(0, 1), Error);
  EXPECT_THROW(overlap_plan(1, 0), Error);
  EXPECT_THROW(overlap_plan(1, 1, {.in_flight = 0}), Error);
  EXPECT_THROW(overlap_plan(2, 1, {.dense = {true}}), Error);
}

}  // namespace
}  // namespace flatshard
