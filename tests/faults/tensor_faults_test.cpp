// Checks the reports of ranks about one that dies where it shares layers with
// another. Each rank is a process.
#include "tests/runtime/tensor_training.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Its peer waits for the activations of a layer, the other group for gradients.
TEST(TensorParallelFaults, ARankKilledInABackwardIsNamed) {
  constexpr int kCulprit = 3;
  const TensorRun run{
      .dp = 2,
      .tp = 2,
      .steps = 4,
      .before_backward = [](const Mesh& mesh, int step) {
        if (mesh.rank() == kCulprit && step == 2) {
          ::raise(SIGKILL);
        }
      }};
  const auto outcomes =
      rank_process_outcomes(run.world(), [&](RankContext& at) {
        const auto mesh = Mesh::create(
            run.axes(),
            at.rank,
            at.store,
            at::kCPU,
            {.communicator = {.timeout = std::chrono::seconds(3)}});
        std::mutex mutex;
        TensorResult result;
        EXPECT_THAT(
            message_of([&] { train_tensor_rank(run, mesh, mutex, result); }),
            AllOf(HasSubstr("rank 3 of 4 is missing"), HasSubstr("step 2")))
            << "on rank " << at.rank;
      });
  for (int rank = 0; rank < kCulprit; ++rank) {
    EXPECT_EQ(outcomes[rank], RankOutcome{}) << rank;
  }
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
}

}  // namespace
}  // namespace flatshard::testing
