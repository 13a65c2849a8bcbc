// Checks the reports of ranks about one that dies while two microbatches are
// under way. Each rank is a process.
#include "flatshard/core/error.h"
#include "tests/overlap/overlap_moe.h"
#include "tests/support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OverlapFaults : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(
    By,
    OverlapFaults,
    ::testing::Bool(),
    [](const auto& info) { return info.param ? "copies" : "collective"; });

// The backward of microbatch 1 and the forward of microbatch 2 have started.
TEST_P(OverlapFaults, ARankKilledInMidScheduleIsNamed) {
  constexpr int kCulprit = 1;
  const MoeOverlapCase c{
      .edp = 1,
      .ep = 2,
      .copies = GetParam(),
      .options = {.delay_wgrad = true}};
  const auto outcomes = rank_process_outcomes(c.world(), [&](RankContext& at) {
    const auto mesh = Mesh::create(
        c.axes(),
        at.rank,
        at.store,
        at::kCPU,
        {.communicator = {.timeout = std::chrono::seconds(3)}});
    const std::string said = message_of([&] {
      MoeOverlapTrainer trainer(c, mesh);
      int step = 1;
      trainer.before_head = [&](int microbatch) {
        if (at.rank == kCulprit && step == 2 && microbatch == 1) {
          ::raise(SIGKILL);
        }
      };
      for (; step <= 3; ++step) {
        trainer.runtime->set_step(step);
        trainer.forward_backward(step);
        trainer.update();
      }
    });
    EXPECT_THAT(
        said,
        AllOf(HasSubstr("rank 1 of 2 is missing"), HasSubstr("step 2")))
        << "on rank " << at.rank;
  });
  EXPECT_EQ(outcomes[0], RankOutcome{});
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
}

}  // namespace
}  // namespace flatshard::testing
