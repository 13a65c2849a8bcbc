#include "flatshard/core/error.h"
#include "tests/faults/faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::Fault;
using testing::FaultCase;
using testing::FaultReport;
using ::testing::HasSubstr;
using testing::run_with_fault;

// Every rank but the culprit ended with a message like this.
void expect_survivors(
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

const auto kWaitsForBlock0 = AllOf(
    // The others' state is as old as their last heartbeat, and this rank's
    // state is in its error's context.
    AnyOf(HasSubstr("step 3, unit block0"), HasSubstr("step 3 | unit block0")),
    HasSubstr("all_gather"),
    HasSubstr("dp.gather #"));

TEST(FaultsGloo, WithoutAFaultNobodyComplains) {
  const FaultCase c;
  for (const FaultReport& report : run_with_fault(c)) {
    EXPECT_EQ(report.outcome, testing::RankOutcome{});
    EXPECT_EQ(report.message, "");
  }
}

TEST(FaultsGloo, AKilledRankIsNamed) {
  const FaultCase c{.fault = Fault::kill};
  const auto reports = run_with_fault(c);
  EXPECT_EQ(reports[2].outcome.signal, SIGKILL);
  expect_survivors(
      c,
      reports,
      AllOf(
          HasSubstr("rank 2 of 3 is missing"),
          HasSubstr("has ended"),
          kWaitsForBlock0));
}

TEST(FaultsGloo, WholeSteps) {
  FaultCase c{.whole_step = true};
  for (const FaultReport& report : run_with_fault(c)) {
    EXPECT_EQ(report.outcome, testing::RankOutcome{});
    EXPECT_EQ(report.message, "");
  }
  c.fault = Fault::kill;
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(HasSubstr("rank 2 of 3 is missing"), kWaitsForBlock0));
}

// They reach the collective only after the watcher has found it dead.
TEST(FaultsGloo, AKilledRankIsNamedWithWhatTheOthersComeTo) {
  const FaultCase c{
      .fault = Fault::kill,
      .others_compute = std::chrono::milliseconds(500)};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr("rank 2 of 3 is missing"),
          HasSubstr("ranks 0-1 wait for"),
          HasSubstr("step 3, unit block0: all_gather")));
}

TEST(FaultsGloo, RankZeroServesTheStoreAndIsNamedToo) {
  const FaultCase c{.fault = Fault::kill, .culprit = 0};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr("rank 0 of 3 is missing: the store served by it"),
          HasSubstr("has ended"),
          HasSubstr("block0")));
}

TEST(FaultsGloo, AStoppedRankIsNamed) {
  const FaultCase c{.fault = Fault::stop};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr("rank 2 of 3 is missing: no heartbeat for"),
          HasSubstr("is stopped by a signal"),
          kWaitsForBlock0));
}

TEST(FaultsGloo, AStoppedRankZeroIsNamed) {
  const FaultCase c{.fault = Fault::stop, .culprit = 0};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr("rank 0 of 3 is missing: the store served by it has not "
                    "answered for"),
          HasSubstr("is stopped by a signal")));
}

TEST(FaultsGloo, ARankThatNeverComesIsLate) {
  const FaultCase c{.fault = Fault::hang};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(
          HasSubstr("rank 2 of 3 is late"),
          HasSubstr("it runs, in no collective for"),
          kWaitsForBlock0));
}

TEST(FaultsGloo, AnExceptionComesWithItsMessage) {
  for (const int culprit : {0, 2}) {
    const FaultCase c{.fault = Fault::exception, .culprit = culprit};
    const auto reports = run_with_fault(c);
    EXPECT_EQ(reports[culprit].message, "the data loader broke");
    expect_survivors(
        c,
        reports,
        HasSubstr(fmt::format(
            "rank {} of 3 failed: the data loader broke",
            culprit)));
  }
}

TEST(FaultsGloo, ARankOutOfMemoryIsNamed) {
  for (const int culprit : {0, 2}) {
    const FaultCase c{.fault = Fault::no_memory, .culprit = culprit};
    const auto reports = run_with_fault(c);
    EXPECT_EQ(reports[culprit].outcome, testing::RankOutcome{});
    EXPECT_THAT(reports[culprit].message, HasSubstr("out of memory"));
    expect_survivors(
        c,
        reports,
        HasSubstr(
            fmt::format("rank {} of 3 failed: CUDA out of memory", culprit)));
  }
}

TEST(FaultsGloo, ARankThatLeavesIsNamed) {
  const FaultCase c{.fault = Fault::exit};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(HasSubstr("rank 2 of 3 is missing"), kWaitsForBlock0));
}

// Both also report themselves.
void expect_all(
    const FaultCase& c,
    const ::testing::Matcher<const std::string&>& message) {
  const auto reports = run_with_fault(c);
  for (int rank = 0; rank < c.world; ++rank) {
    EXPECT_EQ(reports[rank].outcome, testing::RankOutcome{}) << rank;
    EXPECT_THAT(reports[rank].message, message) << "on rank " << rank;
  }
}

TEST(FaultsGloo, ARankThatSkipsAUnit) {
  expect_all(
      {.fault = Fault::skip_unit},
      AllOf(
          HasSubstr("rank 2 issues the collective of another unit at "
                    "dp.gather #"),
          HasSubstr("block1"),
          HasSubstr("ranks 0-1 in step")));
}

TEST(FaultsGloo, ARankWithAnotherOrder) {
  expect_all(
      {.fault = Fault::other_order},
      AllOf(
          HasSubstr("rank 2 issues the collective of another unit at "
                    "dp.gather #"),
          HasSubstr("it is in step 3, unit block1: all_gather"),
          HasSubstr("ranks 0-1 in step 3, unit out: all_gather")));
}

TEST(FaultsGloo, ARankWithAnotherModel) {
  expect_all(
      {.fault = Fault::other_size},
      AllOf(
          HasSubstr("rank 2 issues another size at dp.gather #0"),
          HasSubstr("ranks 0-1 in step 1, unit block0: all_gather")));
}

TEST(FaultsGloo, ARankWithAnotherDtype) {
  expect_all(
      {.fault = Fault::other_dtype},
      AllOf(
          HasSubstr("rank 2 issues another dtype at dp.gather #0"),
          HasSubstr("BFloat16"),
          HasSubstr("unit block0")));
}

TEST(FaultsGloo, HsdpNamesTheRankOfTheWholeMesh) {
  const FaultCase c{
      .fault = Fault::kill,
      .world = 4,
      .culprit = 3,
      .strategy = "hsdp",
      .mesh = {2, 2}};
  expect_survivors(
      c,
      run_with_fault(c),
      AllOf(HasSubstr("rank 3 of 4 is missing"), HasSubstr("step 3")));
}

// A timeout that no test waits for: faults that are found at once are reported
// at once.
constexpr std::chrono::seconds kLongTimeout{80};

std::vector<FaultReport> run_on_mesh(
    const std::function<void(Mesh&, const at::Tensor& all)>& function) {
  return testing::run_reporting(2, [&](testing::RankContext& context) {
    const auto mesh = Mesh::create(
        {{"dp", 2}},
        context.rank,
        context.store,
        at::kCPU,
        {.communicator = {.timeout = kLongTimeout}});
    function(*mesh, at::ones({4}));
  });
}

// Each waits in a group that the other does not reach, so only the order of the
// program can be compared.
TEST(FaultsGloo, RanksThatWaitForEachOtherInTwoGroupsAreToldAtOnce) {
  const auto began = std::chrono::steady_clock::now();
  const auto reports = run_on_mesh([](Mesh& mesh, const at::Tensor& all) {
    auto& gather = mesh.communicator(0, Purpose::gather);
    auto& reduce = mesh.communicator(0, Purpose::reduce);
    gather.all_reduce(all, ReduceOp::sum);
    reduce.all_reduce(all, ReduceOp::sum);
    (mesh.rank() == 0 ? gather : reduce).all_reduce(all, ReduceOp::sum);
  });
  for (const FaultReport& report : reports) {
    EXPECT_EQ(report.outcome, testing::RankOutcome{});
    EXPECT_THAT(
        report.message,
        AllOf(
            HasSubstr("ranks 0 and 1 followed different paths: rank 0 waits "
                      "in step 0: all_reduce of 4 Float, sum (dp.gather #1), "
                      "and rank 1 waits in step 0: all_reduce of 4 Float, sum "
                      "(dp.reduce #1)"),
            HasSubstr("all ranks must run the same units")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, kLongTimeout / 2);
}

TEST(FaultsGloo, WhoWaitsForARankThatEndedItsRunIsToldAtOnce) {
  const auto began = std::chrono::steady_clock::now();
  const auto reports = run_on_mesh([](Mesh& mesh, const at::Tensor& all) {
    auto& gather = mesh.communicator(0, Purpose::gather);
    gather.all_reduce(all, ReduceOp::sum);
    if (mesh.rank() == 0) {
      gather.all_reduce(all, ReduceOp::sum);
    }
  });
  EXPECT_THAT(
      reports[0].message,
      AllOf(
          HasSubstr("rank 1 of 2 has ended its run: it has not reached step "
                    "0: all_reduce of 4 Float, sum (dp.gather #1)"),
          HasSubstr("all ranks must run the same number of steps")));
  EXPECT_EQ(reports[1].message, "");
  EXPECT_LT(std::chrono::steady_clock::now() - began, kLongTimeout / 2);
}

}  // namespace
}  // namespace flatshard
