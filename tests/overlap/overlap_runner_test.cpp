// Steps by an OverlapPlan against plain accumulation of the same microbatches.
#include "flatshard/core/error.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/schedule/simulate.h"
#include "tests/overlap/overlap_toy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

void expect_equal_to_plain(const OverlapCase& c) {
  SCOPED_TRACE(c.name());
  OverlapCase plain = c;
  plain.with_runner = false;
  const OverlapResult want = train_overlapped(plain);
  const OverlapResult got = train_overlapped(c);
  EXPECT_EQ(got.losses, want.losses);
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (const auto& [name, values] : want.weights) {
    EXPECT_TRUE(got.weights.at(name) == values) << name;
  }
}

std::vector<OverlapCase> whole_matrix() {
  std::vector<OverlapCase> cases;
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3", "hsdp"}) {
    for (const int microbatches : {2, 3, 5}) {
      for (int bits = 0; bits < 8; ++bits) {
        cases.push_back(
            {.strategy = strategy,
             .microbatches = microbatches,
             .options = {
                 .delay_wgrad = (bits & 1) != 0,
                 .recompute = (bits & 2) != 0,
                 .shared_experts = (bits & 4) != 0}});
      }
    }
  }
  return cases;
}

// Returns all pairs of two values that some case of the matrix has.
std::vector<OverlapCase> pairwise() {
  const auto pairs_of = [](const OverlapCase& c) {
    const std::vector<std::string> values{
        c.strategy,
        "m" + std::to_string(c.microbatches),
        c.options.delay_wgrad ? "d1" : "d0",
        c.options.recompute ? "r1" : "r0",
        c.options.shared_experts ? "s1" : "s0"};
    std::set<std::string> pairs;
    for (std::size_t i = 0; i < values.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        pairs.insert(values[i] + values[j]);
      }
    }
    return pairs;
  };
  const auto all = whole_matrix();
  std::set<std::string> missing;
  for (const OverlapCase& c : all) {
    missing.merge(pairs_of(c));
  }
  std::vector<OverlapCase> chosen;
  while (!missing.empty()) {
    const auto gain = [&](const OverlapCase& c) {
      const auto pairs = pairs_of(c);
      return std::ranges::count_if(pairs, [&](const auto& pair) {
        return missing.contains(pair);
      });
    };
    chosen.push_back(*std::ranges::max_element(all, {}, gain));
    for (const auto& pair : pairs_of(chosen.back())) {
      missing.erase(pair);
    }
  }
  return chosen;
}

TEST(OverlapRunner, P8_EqualsPlainAccumulationPairwise) {
  for (const OverlapCase& c : pairwise()) {
    expect_equal_to_plain(c);
  }
}

// The full matrix: --gtest_also_run_disabled_tests.
TEST(OverlapRunner, DISABLED_EqualsPlainAccumulationInTheWholeMatrix) {
  for (const OverlapCase& c : whole_matrix()) {
    expect_equal_to_plain(c);
  }
}

TEST(OverlapRunner, RunsDenseLayersBetweenAndOneMicrobatch) {
  const OverlapPlanOptions some_dense{
      .delay_wgrad = true,
      .shared_experts = true,
      .dense = {true, false, true, false}};
  OverlapPlanOptions recomputed = some_dense;
  recomputed.recompute = true;
  for (const auto& options : {some_dense, recomputed}) {
    expect_equal_to_plain({.options = options});
  }
  expect_equal_to_plain({.microbatches = 1, .options = {.delay_wgrad = true}});
  expect_equal_to_plain(
      {.microbatches = 2, .options = {.in_flight = 1}, .layers = 1});
  expect_equal_to_plain(
      {.strategy = "hfsdp", .options = {.delay_wgrad = true}});
}

TEST(OverlapRunner, P12_TwoForwardsReadTheWeightsOfOneUnit) {
  for (const bool recompute : {false, true}) {
    expect_equal_to_plain(
        {.microbatches = 5,
         .options = {
             .in_flight = 3,
             .delay_wgrad = true,
             .recompute = recompute,
             .shared_experts = true,
             .dense = {true, false, true, false}}});
  }
  expect_equal_to_plain({.microbatches = 6, .options = {.in_flight = 5}});
  expect_equal_to_plain({.strategy = "zero1", .options = {.in_flight = 4}});
}

TEST(OverlapRunner, P10_ActionsAndOrderAreTheSimulators) {
  for (const bool delay : {false, true}) {
    for (const bool recompute : {false, true}) {
      const OverlapCase c{
          .options =
              {.in_flight = delay ? 3 : 2,
               .delay_wgrad = delay,
               .recompute = recompute,
               .shared_experts = true},
          .ends_are_units = !recompute};
      SCOPED_TRACE(c.name());
      run_ranks(c.world(), [&](RankContext& context) {
        OverlapTrainer trainer(c, context);
        Runtime& runtime = *trainer.runtime;
        OverlapStack& model = trainer.model;
        PlanUnits units{.embed_grads = 2, .head_grads = 1, .root_grads = 1};
        if (c.ends_are_units) {
          units.ends = PlanUnits::Ends{
              .embed = runtime.unit_of(*model->in),
              .head = runtime.unit_of(*model->out)};
        }
        for (const OverlapBlock& block : model->blocks) {
          units.layers.push_back(runtime.unit_of(*block));
          units.layer_grads.push_back({.attend = 3, .shared = 2, .experts = 1});
        }
        Scheduler paper(
            runtime.scheduler().units(),
            runtime.scheduler().options());
        const auto events =
            plan_events(trainer.runner->plan(), units, c.options);
        for (int step = 0; step < 3; ++step) {
          runtime.clear_trace();
          trainer.forward_backward(step);
          auto want = paper.on({.kind = EventKind::weights_changed});
          for (const Action& action : replay(paper, events)) {
            want.push_back(action);
          }
          const auto got = runtime.trace().actions;
          EXPECT_EQ(to_string(got), to_string(want)) << "step " << step;
          EXPECT_EQ(
              gathered_nbytes(runtime.scheduler().units(), got),
              gathered_nbytes(runtime.scheduler().units(), want));
          EXPECT_TRUE(runtime.scheduler().resting());
          EXPECT_EQ(runtime.executor().slots().pool().num_held(), 0);
          trainer.update();
        }
        // The slots that the plan asked for were enough.
        EXPECT_EQ(runtime.executor().slots().pool().num_dynamic(), 0);
      });
    }
  }
}

TEST(OverlapRunner, P9_AnExceptionInAnyNodeLeavesTheNextStepRight) {
  const OverlapCase c{
      .microbatches = 2,
      .options =
          {.delay_wgrad = true, .recompute = true, .shared_experts = true},
      .layers = 2};
  OverlapCase plain = c;
  plain.with_runner = false;
  run_ranks(c.world(), [&](RankContext& context) {
    OverlapTrainer trainer(c, context);
    std::map<std::string, std::vector<float>> want;
    std::map<std::string, std::vector<float>> got;
    std::mutex mutex;
    const auto gradients = [&] {
      trainer.runtime->synchronize();
      std::vector<at::Tensor> all;
      for (ParamGroup* group : trainer.runtime->groups()) {
        all.push_back(group->gradients().reduced().local().clone());
        group->gradients().zero();
      }
      return all;
    };
    trainer.forward_backward(0);
    const auto right = gradients();
    std::set<std::string> seen;
    for (const char* node :
         {"attend", "dispatch", "shared", "experts", "combine", "merge"}) {
      for (int nth = 0; nth < 12; ++nth) {
        // Each run of the first block in turn.
        int count = 0;
        bool thrown = false;
        trainer.model->blocks[0]->on_node = [&](const std::string& name) {
          if (name == node && count++ == nth) {
            thrown = true;
            throw std::runtime_error("the test's");
          }
        };
        try {
          trainer.forward_backward(0);
          EXPECT_FALSE(thrown) << node << nth;
        } catch (const std::exception& error) {
          EXPECT_THAT(error.what(), HasSubstr("the test's"));
          seen.insert(node);
        }
        trainer.model->blocks[0]->on_node = nullptr;
        if (!thrown) {
          gradients();
          break;
        }
        trainer.forward_backward(0);
        const auto now = gradients();
        for (std::size_t i = 0; i < right.size(); ++i) {
          EXPECT_TRUE(at::equal(now[i], right[i])) << node << nth << ' ' << i;
        }
      }
    }
    EXPECT_EQ(seen.size(), 6U);
  });
}

}  // namespace
}  // namespace flatshard::testing
