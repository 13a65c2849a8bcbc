#include "flatshard/train/plan/run_plan.h"

#include "flatshard/plan/gpu.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

/// Returns a step of Llama-3-8B with long sequences and full recompute.
plan::StepPlan step_with(std::vector<std::string> overrides) {
  for (const char* set :
       {"model.max_seq_len=32768",
        "training.seq_len=32768",
        "activation_checkpoint.mode=full"}) {
    overrides.emplace_back(set);
  }
  const PlannedMachines machines{.ranks = 8, .gpu = plan::find_gpu("h200")};
  return plan_run(config_of_preset("llama3_8b", overrides), machines)
      .estimate.step;
}

TEST(RunPlan, OverlapHidesCopiesOfStates) {
  const double plain = step_with({}).seconds;
  const double offloaded = step_with({"optimizer.offload_states=true"}).seconds;
  const double hidden =
      step_with({"optimizer.offload_states=true", "optimizer.overlap=true"})
          .seconds;
  EXPECT_GT(offloaded, plain + 0.1);
  EXPECT_LT(hidden, plain + 0.05);
}

TEST(RunPlan, SmallChunksOfTokensTakeTime) {
  const plan::StepPlan whole = step_with({});
  for (const std::string key : {"mlp_chunk_tokens", "loss_chunk_tokens"}) {
    const auto with = [&](const std::string& tokens) {
      return step_with({"activation_checkpoint." + key + "=" + tokens});
    };
    EXPECT_LT(with("8192").seconds, 1.1 * whole.seconds) << key;
    EXPECT_GT(with("1").seconds, 2 * whole.seconds) << key;
    EXPECT_GT(with("1").host_seconds, 20 * whole.host_seconds) << key;
  }
}

}  // namespace
}  // namespace flatshard
