// Units that decide for themselves when their gradients are reduced.
#include "flatshard/schedule/scheduler.h"
#include "flatshard/schedule/simulate.h"
#include "tests/schedule/blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string reductions(
    const std::vector<UnitSpec>& units,
    bool is_last = true,
    bool sync = true) {
  Scheduler s(units, {.prefetch = 1});
  s.on({.kind = EventKind::microbatch, .is_last = is_last, .sync = sync});
  std::vector<int> num_grads;
  for (const UnitSpec& unit : units) {
    num_grads.push_back(unit.grad_nbytes > 0 ? 1 : 0);
  }
  std::vector<Action> found = replay(s, plain_step_events(units, num_grads));
  std::erase_if(found, [](const Action& a) {
    return a.kind != ActionKind::reduce && a.kind != ActionKind::accumulate;
  });
  std::string text = to_string(found);
  for (const Action& a : found) {
    text += a.is_last ? " last" : " not";
  }
  return text;
}

TEST(UnitSync, AUnitAccumulatesWhereItsPolicyOrTheMicrobatchSaysSo) {
  auto units = testing::blocks(3);
  units[2].policy.sync_gradients = false;
  EXPECT_EQ(
      reductions(units),
      "reduce(3) accumulate(2) reduce(1) last last last");
  EXPECT_EQ(
      reductions(units, true, false),
      "accumulate(3) accumulate(2) accumulate(1) last last last");
}

TEST(UnitSync, AUnitLeavesItsOuterAxisWhereItsPolicyOrTheMicrobatchSaysSo) {
  auto units = testing::blocks(3);
  units[2].policy.all_reduce = false;
  EXPECT_EQ(reductions(units), "reduce(3) reduce(2) reduce(1) last not last");
  EXPECT_EQ(
      reductions(units, false),
      "reduce(3) reduce(2) reduce(1) not not not");
  units[2].reduce_every_microbatch = false;
  EXPECT_EQ(
      reductions(units),
      "reduce(3) accumulate(2) reduce(1) last not last");
}

TEST(UnitSync, TheLastBackwardFinishesUnitsThatSynchronize) {
  for (const UnitPolicy& policy :
       {UnitPolicy(),
        UnitPolicy{.sync_gradients = false},
        UnitPolicy{.all_reduce = false}}) {
    auto units = testing::blocks(2);
    units[2].policy = policy;
    Scheduler s(units, {});
    s.on({.kind = EventKind::task_begin, .task = 1});
    const std::string end = to_string(s.on(
        {.kind = EventKind::task_end,
         .task = 1,
         .outermost = true,
         .unfinished = {2}}));
    EXPECT_EQ(
        end.find("reduce(2)") != std::string::npos,
        policy == UnitPolicy());
    EXPECT_THAT(end, Not(HasSubstr("accumulate")));
  }
}

}  // namespace
}  // namespace flatshard
