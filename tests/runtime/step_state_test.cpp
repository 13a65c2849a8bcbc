#include "flatshard/runtime/step_state.h"
#include "tests/runtime/twin.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::for_strategies;
using testing::forward_backward;
using testing::RankContext;
using testing::Twin;

StepState state_after(Twin& twin) {
  twin.step(forward_backward);
  return twin.runtime->core().step;
}

TEST(StepState, StepsThatDoTheSameLeaveTheSame) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, std::move(options));
    state_after(twin);  // the first one predicts by the order of registration
    StepState second = state_after(twin);
    StepState third = state_after(twin);
    EXPECT_FALSE(third.actions.empty());
    EXPECT_GT(third.generation, second.generation);
    second.generation = third.generation;
    EXPECT_EQ(second, third);
  });
}

TEST(StepState, AStepCanBeUndone) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, std::move(options));
    state_after(twin);
    twin.run_sharded(forward_backward);
    RuntimeCore& core = twin.runtime->core();
    const StepState before = core.step;
    twin.runtime->set_sync_gradients(false);
    twin.run_sharded(forward_backward);
    EXPECT_NE(core.step, before);
    core.step = before;
    EXPECT_EQ(core.step, before);
    twin.runtime->set_sync_gradients(true);
    twin.runtime->zero_grad();
    twin.step(forward_backward);
    EXPECT_FALSE(core.step.failed());
  });
}

}  // namespace
}  // namespace flatshard
