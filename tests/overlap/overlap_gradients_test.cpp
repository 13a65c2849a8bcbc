// Gradients and rows of two microbatches in flight where they are uneven.
#include "tests/overlap/overlap_moe.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace flatshard::testing {
namespace {

void expect_equal_to_plain_moe(const MoeOverlapCase& c) {
  SCOPED_TRACE(c.name());
  MoeOverlapCase plain = c;
  plain.with_runner = false;
  expect_same(train_overlapped_moe(c), train_overlapped_moe(plain));
}

// Returns both policies that put weight gradients off, and both ways of an
// exchange.
std::vector<MoeOverlapCase> uneven_cases() {
  return {
      {.edp = 1, .ep = 2, .options = {.delay_wgrad = true}},
      {.strategy = "zero1",
       .edp = 1,
       .ep = 2,
       .copies = true,
       .options = {.recompute = true, .shared_experts = true}},
      {.edp = 2,
       .ep = 2,
       .copies = true,
       .microbatches = 2,
       .options = {.in_flight = 1, .delay_wgrad = true}}};
}

int experts_chosen(const MoeOverlapResult& result) {
  int chosen = 0;
  for (const std::int64_t count : result.counts.at(0)) {
    chosen += count > 0 ? 1 : 0;
  }
  return chosen;
}

// Equal tokens have equal keys and values wherever they stand, so all of them
// choose the same two experts of a layer.
at::Tensor equal_tokens(int /*microbatch*/, const at::Tensor& random) {
  return at::zeros_like(random);
}

TEST(OverlapGradients, AllTokensGoToOneExpert) {
  for (MoeOverlapCase c : uneven_cases()) {
    c.change_tokens = equal_tokens;
    c.change_model = [](models::ModelConfig& model) {
      model.moe.experts_per_token = 1;
    };
    c.steps = 2;
    MoeOverlapCase one = c;
    one.steps = 1;
    EXPECT_EQ(experts_chosen(train_overlapped_moe(one)), 2);  // of two layers
    expect_equal_to_plain_moe(c);
  }
}

TEST(OverlapGradients, MostTokensGoToTwoExperts) {
  for (MoeOverlapCase c : uneven_cases()) {
    c.change_tokens = [](int /*microbatch*/, const at::Tensor& random) {
      return at::where(random < 48, at::zeros_like(random), random);
    };
    c.steps = 2;
    expect_equal_to_plain_moe(c);
  }
}

// The first gradient of most experts comes in the step's last backward.
TEST(OverlapGradients, AnExpertIsUsedOnlyInTheLastMicrobatch) {
  for (MoeOverlapCase c : uneven_cases()) {
    c.steps = 1;
    c.change_tokens = equal_tokens;
    const int before = experts_chosen(train_overlapped_moe(c));
    c.change_tokens = [&c](int microbatch, const at::Tensor& random) {
      return microbatch + 1 < c.microbatches ? at::zeros_like(random) : random;
    };
    EXPECT_GT(experts_chosen(train_overlapped_moe(c)), before);
    c.steps = 3;
    expect_equal_to_plain_moe(c);
  }
}

// The tied weight belongs to the root. The root's backward is open from the
// head to the embedding.
TEST(OverlapGradients, ATiedHeadHasOneGradient) {
  for (MoeOverlapCase c : uneven_cases()) {
    c.change_model = [](models::ModelConfig& model) {
      model.tie_embeddings = true;
    };
    c.steps = 2;
    expect_equal_to_plain_moe(c);
  }
}

// Their gradients are computed in the backward, weight gradients after it.
TEST(OverlapGradients, ExpertsWithBiasesAndSinks) {
  for (MoeOverlapCase c : uneven_cases()) {
    c.options.shared_experts = false;
    c.dense_layers = 0;
    c.change_model = [](models::ModelConfig& model) {
      model.family = "gpt_oss";
      model.block = models::family_defaults("gpt_oss").block;
      model.block.attention.window = 5;
      model.moe = {.num_experts = model.moe.num_experts};
    };
    c.steps = 2;
    expect_equal_to_plain_moe(c);
  }
}

TEST(OverlapGradients, ExpertsThatChangeAreReadInTheNextStep) {
  for (MoeOverlapCase c : uneven_cases()) {
    const MoeOverlapResult as_before = train_overlapped_moe(c);
    c.before_step = [](MoeOverlapTrainer& trainer, int step) {
      if (step != 1) {
        return;
      }
      for (ParamGroup* group : trainer.runtime->groups()) {
        for (NamedShard& shard : group->main_shards()) {
          if (models::is_expert_parameter(shard.name())) {
            shard.tensor.mul_(-2);
          }
        }
      }
    };
    const MoeOverlapResult changed = train_overlapped_moe(c);
    for (const auto& [key, loss] : changed.losses) {
      const int step = std::get<0>(key);
      EXPECT_EQ(loss == as_before.losses.at(key), step == 0) << step;
    }
    expect_equal_to_plain_moe(c);
  }
}

// Weight gradients and reductions in a step, for each unit.
TEST(OverlapGradients, EveryParameterIsReducedOnceInABackward) {
  for (const char* strategy : {"zero1", "zero3"}) {
    for (const int in_flight : {1, 2, 3}) {
      for (const bool tied : {true, false}) {
        MoeOverlapCase c{
            .strategy = strategy,
            .edp = 1,
            .ep = 2,
            .options = {
                .in_flight = in_flight,
                .delay_wgrad = true,
                .shared_experts = true}};
        c.change_model = [tied](models::ModelConfig& model) {
          model.tie_embeddings = tied;
        };
        // ZeRO-1 adds up what microbatches before the last one leave.
        const int reductions = std::string(strategy) == "zero1" ? 1 : 3;
        ASSERT_EQ(c.microbatches, 3);
        run_ranks(c.world(), [&](RankContext& context) {
          MoeOverlapTrainer trainer(c, context.mesh(c.axes()));
          trainer.forward_backward(0);
          trainer.runtime->synchronize();
          trainer.runtime->clear_trace();
          trainer.forward_backward(1);
          const RuntimeTrace trace = trainer.runtime->trace();
          std::map<UnitId, std::map<ActionKind, int>> actions;
          std::map<UnitId, int> gradients;
          for (const Action& action : trace.actions) {
            ++actions[action.unit][action.kind];
          }
          for (const ScheduleEvent& event : trace.events) {
            gradients[event.unit] += event.kind == EventKind::wgrad_done;
          }
          const UnitId root = trainer.runtime->unit_of(*trainer.llama);
          int num_units = 0;
          for (const auto& of : trainer.runtime->units()) {
            const UnitId unit = of->id();
            const auto num_parameters =
                static_cast<int>(of->parameters().size());
            // The tied weight gets one in the head's run of the engine, and one
            // in the embedding's run. It is the root's only parameter.
            const int runs = tied && unit == root ? 2 : 1;
            EXPECT_EQ(gradients[unit], 3 * runs * num_parameters) << unit;
            if (num_parameters > 0) {
              ++num_units;
              EXPECT_EQ(actions[unit][ActionKind::reduce], reductions) << unit;
              EXPECT_EQ(actions[unit][ActionKind::accumulate], 3 - reductions)
                  << unit;
            }
          }
          // Root and head, or embedding and head, and three blocks.
          EXPECT_EQ(num_units, 5);
        });
      }
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
