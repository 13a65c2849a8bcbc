// The same faults over NCCL. Ranks are forked because this process must never
// touch a GPU. Up to four ranks, one per GPU; with less than two GPUs it skips
// itself. Or FLATSHARD_FAULT_RANKS of them, and these share the GPUs, one is
// enough, as if on several hosts.
#include "flatshard/core/error.h"
#include "tests/faults/faults.h"
#include "tests/support/gpu_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::Fault;
using testing::FaultCase;
using testing::FaultReport;
using ::testing::HasSubstr;
using testing::run_with_fault;

class FaultsNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const bool shares = std::getenv("FLATSHARD_FAULT_RANKS") != nullptr;
    if (testing::num_visible_gpus() < (shares ? 1 : 2)) {
      GTEST_SKIP() << "faults over NCCL need two GPUs, found "
                   << testing::num_visible_gpus();
    }
  }

  // The last rank is at fault, unless it is rank 0.
  static FaultCase with(Fault fault, bool rank_zero = false) {
    const char* wanted = std::getenv("FLATSHARD_FAULT_RANKS");
    const int world = wanted != nullptr
                          ? std::stoi(wanted)
                          : std::min(testing::num_visible_gpus(), 4);
    return {
        .fault = fault,
        .world = world,
        .culprit = rank_zero ? 0 : world - 1,
        .device = at::kCUDA,
        .num_gpus = testing::num_visible_gpus(),
        // Silent differences are found by and by.
        .steps = fault == Fault::none ? 20 : 100000,
        .timeout = std::chrono::seconds(6)};
  }

  static std::string culprit(const FaultCase& c) {
    return fmt::format("rank {} of {}", c.culprit, c.world);
  }

  static void expect_survivors(
      const FaultCase& c,
      const std::vector<FaultReport>& reports,
      const ::testing::Matcher<const std::string&>& message) {
    for (int rank = 0; rank < c.world; ++rank) {
      if (rank != c.culprit) {
        EXPECT_EQ(reports[rank].outcome, testing::RankOutcome{}) << rank;
        EXPECT_THAT(reports[rank].message, message) << "on rank " << rank;
      }
    }
  }

  static void expect_all(
      const FaultCase& c,
      const ::testing::Matcher<const std::string&>& message) {
    const auto reports = run_with_fault(c);
    expect_survivors(c, reports, message);
    EXPECT_EQ(reports[c.culprit].outcome, testing::RankOutcome{});
    EXPECT_THAT(reports[c.culprit].message, message);
  }
};

const auto kWaitsForBlock0 = AllOf(
    // The others' state is as old as their last heartbeat, and this rank's
    // state is in its error's context.
    AnyOf(HasSubstr("step 3, unit block0"), HasSubstr("step 3 | unit block0")),
    HasSubstr("all_gather"),
    HasSubstr("dp.gather #"));

TEST_F(FaultsNccl, WithoutAFaultNobodyComplains) {
  for (const FaultReport& report : run_with_fault(with(Fault::none))) {
    EXPECT_EQ(report.outcome, testing::RankOutcome{});
    EXPECT_EQ(report.message, "");
  }
}

TEST_F(FaultsNccl, AKilledRankIsNamed) {
  const FaultCase c = with(Fault::kill);
  const auto reports = run_with_fault(c);
  EXPECT_EQ(reports[c.culprit].outcome.signal, SIGKILL);
  expect_survivors(
      c,
      reports,
      AllOf(
          HasSubstr(culprit(c) + " is missing"),
          HasSubstr("has ended"),
          kWaitsForBlock0));
}

// Streams wait for memory then, not in an NCCL kernel.
TEST_F(FaultsNccl, AKilledOrStoppedRankIsNamedBesideCopies) {
  for (const Fault fault : {Fault::none, Fault::kill, Fault::stop}) {
    FaultCase c = with(fault);
    c.copy_engines = true;
    const auto reports = run_with_fault(c);
    expect_survivors(
        c,
        reports,
        fault == Fault::none ? ::testing::Matcher<const std::string&>("")
                             : AllOf(
                                   HasSubstr(culprit(c) + " is missing"),
                                   HasSubstr("block0"),
                                   HasSubstr("fence")));
  }
}

TEST_F(FaultsNccl, RankZeroServesTheStoreAndIsNamedToo) {
  const FaultCase c = with(Fault::kill, true);
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr(culprit(c) + " is missing: the store served by it"),
          HasSubstr("block0")));
}

TEST_F(FaultsNccl, AStoppedRankIsNamed) {
  const FaultCase c = with(Fault::stop);
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr(culprit(c) + " is missing: no heartbeat for"),
          HasSubstr("is stopped by a signal"),
          kWaitsForBlock0));
}

TEST_F(FaultsNccl, AStoppedRankZeroIsNamed) {
  const FaultCase c = with(Fault::stop, true);
  expect_survivors(
      c,
      run_with_fault(c),
      HasSubstr(
          culprit(c) +
          " is missing: the store served by it has not answered for"));
}

TEST_F(FaultsNccl, ARankThatNeverComesIsLate) {
  const FaultCase c = with(Fault::hang);
  expect_all(c, AllOf(HasSubstr(culprit(c) + " is late"), kWaitsForBlock0));
}

// All work of a step is one launch then, and the host is far ahead. The numbers
// that the graph writes show its progress, and NCCL can only end together with
// the graph.
TEST_F(FaultsNccl, WholeStepsWithoutAFault) {
  FaultCase c = with(Fault::none);
  c.whole_step = true;
  for (const FaultReport& report : run_with_fault(c)) {
    EXPECT_EQ(report.outcome, testing::RankOutcome{});
    EXPECT_EQ(report.message, "");
  }
}

TEST_F(FaultsNccl, WholeStepsWithARankThatIsGone) {
  for (const Fault fault : {Fault::kill, Fault::stop}) {
    FaultCase c = with(fault);
    c.whole_step = true;
    expect_survivors(
        c,
        run_with_fault(c),
        AllOf(HasSubstr(culprit(c) + " is missing"), kWaitsForBlock0));
  }
}

TEST_F(FaultsNccl, WholeStepsWithARankThatNeverComes) {
  FaultCase c = with(Fault::hang);
  c.whole_step = true;
  expect_all(c, AllOf(HasSubstr(culprit(c) + " is late"), kWaitsForBlock0));
}

TEST_F(FaultsNccl, WholeStepsWithADeviceThatDoesNotCome) {
  FaultCase c = with(Fault::device_hang);
  c.whole_step = true;
  expect_all(
      c,
      AllOf(
          HasSubstr(culprit(c) + " is late: its device has not reached"),
          kWaitsForBlock0));
}

// The same without graphs.
TEST_F(FaultsNccl, ADeviceThatDoesNotComeIsNamed) {
  const FaultCase c = with(Fault::device_hang);
  // Its all-gathers run ahead on a separate stream, up to one that waits.
  expect_all(
      c,
      AllOf(
          HasSubstr(culprit(c) + " is late: its device has not reached step 3"),
          HasSubstr("dp.gather #")));
}

TEST_F(FaultsNccl, AnExceptionComesWithItsMessage) {
  for (const bool rank_zero : {false, true}) {
    const FaultCase c = with(Fault::exception, rank_zero);
    const auto reports = run_with_fault(c);
    EXPECT_EQ(reports[c.culprit].message, "the data loader broke");
    expect_survivors(
        c,
        reports,
        HasSubstr(culprit(c) + " failed: the data loader broke"));
  }
}

// NCCL compares nothing: the sizes below are equal or the ranks hang, and the
// watcher finds the difference either way.
TEST_F(FaultsNccl, ARankThatSkipsAUnit) {
  const FaultCase c = with(Fault::skip_unit);
  expect_all(
      c,
      AllOf(
          HasSubstr(fmt::format(
              "rank {} issues the collective of another unit",
              c.culprit)),
          HasSubstr("block1")));
}

TEST_F(FaultsNccl, ARankWithAnotherOrder) {
  const FaultCase c = with(Fault::other_order);
  expect_all(
      c,
      AllOf(
          HasSubstr(fmt::format(
              "rank {} issues the collective of another unit",
              c.culprit)),
          HasSubstr("unit block1"),
          HasSubstr("unit out")));
}

TEST_F(FaultsNccl, ARankWithAnotherModel) {
  const FaultCase c = with(Fault::other_size);
  expect_all(
      c,
      AllOf(
          HasSubstr(fmt::format("rank {} issues another size", c.culprit)),
          HasSubstr("unit block0: all_gather")));
}

TEST_F(FaultsNccl, ARankWithAnotherDtype) {
  const FaultCase c = with(Fault::other_dtype);
  expect_all(
      c,
      AllOf(
          HasSubstr(fmt::format("rank {} issues another dtype", c.culprit)),
          HasSubstr("BFloat16")));
}

}  // namespace
}  // namespace flatshard
