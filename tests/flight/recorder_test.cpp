#include "flatshard/flight/recorder.h"
#include "flatshard/comm/collective_scope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <future>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::run_ranks;

std::shared_ptr<FlightRecorder> recorder(
    const RankContext& context,
    FlightRecorderOptions options = {}) {
  return std::make_shared<FlightRecorder>(
      context.rank,
      context.world,
      context.store,
      at::kCPU,
      options);
}

CollectiveSignature signature(std::string unit, std::int64_t numel = 8) {
  return {
      .kind = CollectiveKind::all_gather,
      .numel = numel,
      .dtype = at::kFloat,
      .unit = std::move(unit)};
}

// Its abort returns when the test lets it, as NCCL's with a stopped peer.
class StuckCommunicator : public Communicator {
 public:
  /// @param began  set when the abort starts; may be null.
  explicit StuckCommunicator(
      std::shared_future<void> let_go,
      std::promise<void>* began = nullptr)
      : Communicator(0, 1, "dp.gather", at::kCPU),
        let_go_(std::move(let_go)),
        began_(began) {}

  void do_abort() override {
    if (began_ != nullptr) {
      began_->set_value();
    }
    let_go_.wait();
  }

 private:
  void do_all_gather(Tensors, Tensors) override {}
  void do_reduce_scatter(Tensors, Tensors, ReduceOp) override {}
  void do_all_reduce(at::Tensor, ReduceOp) override {}
  void do_broadcast(at::Tensor, int) override {}
  void do_all_to_all(at::Tensor, at::Tensor, Parts, Parts) override {}
  void do_barrier() override {}

  std::shared_future<void> let_go_;
  std::promise<void>* began_;
};

// Returns a communicator that nothing is sent over.
std::shared_ptr<Communicator> silent_communicator() {
  return make_self_communicator("dp.gather", at::kCPU);
}

std::string error_of(FlightRecorder& flight) {
  try {
    flight.check();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

void wait_for_verdict(const FlightRecorder& flight) {
  while (!flight.verdict()) {
    ::poll(nullptr, 0, 2);
  }
}

TEST(FlightRecorder, KeepsTheNewestWithStepUnitAndState) {
  run_ranks(2, [](RankContext& context) {
    const auto flight = recorder(context, {.capacity = 16});
    const auto group = silent_communicator();
    const int track = flight->watch(group, "g");
    flight->set_step(4);
    for (int i = 0; i < 20; ++i) {
      flight->completed(flight->begin(track, signature("a")));
    }
    {
      const CollectiveScope outer(9, "b");
      const CollectiveScope inner("c");
      EXPECT_EQ(CollectiveScope::current()->unit(), "c");
    }
    const CollectiveScope scope(9, "b");
    flight->begin(track, signature("b"));
    const FlightState state = flight->state();
    ASSERT_EQ(state.tracks.size(), 1U);
    const FlightTrack& kept = state.tracks[0];
    EXPECT_EQ(kept.num_launched, 21);
    ASSERT_EQ(kept.entries.size(), 16U);
    EXPECT_EQ(kept.entries.front().seq, 5);
    EXPECT_EQ(kept.entries.front().step, 4);
    EXPECT_EQ(kept.entries.front().state, CollectiveState::completed);
    EXPECT_EQ(kept.entries.back().signature.unit, "b");
    EXPECT_EQ(kept.entries.back().step, 9);
    ASSERT_NE(kept.pending(), nullptr);
    EXPECT_EQ(kept.pending()->seq, 20);
    EXPECT_FALSE(flight->verdict());
    EXPECT_EQ(error_of(*flight), "");
  });
}

// Differences that hang nowhere are also found: equal sizes, another unit.
TEST(FlightRecorder, SilentDifferencesAreFound) {
  run_ranks(3, [](RankContext& context) {
    const auto flight = recorder(context, {.timeout = 2s});
    const auto group = silent_communicator();
    const int track = flight->watch(group, "g");
    for (int i = 0; i < 100; ++i) {
      const bool odd = context.rank == 1 && i == 37;
      flight->completed(flight->begin(track, signature(odd ? "x" : "a")));
    }
    wait_for_verdict(*flight);
    EXPECT_THAT(
        error_of(*flight),
        AllOf(
            HasSubstr("rank 1 issues the collective of another unit at "
                      "dp.gather #37"),
            HasSubstr("ranks 0, 2 in step 0, unit a")));
    EXPECT_THROW(flight->begin(track, signature("a")), Error);
  });
}

TEST(FlightRecorder, AStallNamesTheRankThatDidNotCome) {
  run_ranks(2, [](RankContext& context) {
    const auto flight = recorder(context, {.timeout = 1s});
    const auto group = silent_communicator();
    const int track = flight->watch(group, "g");
    flight->completed(flight->begin(track, signature("a")));
    if (context.rank == 0) {
      flight->begin(track, signature("b"));
    }
    wait_for_verdict(*flight);
    EXPECT_THAT(
        error_of(*flight),
        AllOf(
            HasSubstr("timeout error: rank 1 of 2 is late"),
            HasSubstr("unit b: all_gather of 8 Float (dp.gather #1)")));
  });
}

TEST(FlightRecorder, AFailureIsToldAtOnce) {
  run_ranks(3, [](RankContext& context) {
    const auto flight = recorder(context);  // ten minutes
    flight->set_step(5);
    if (context.rank == 1) {
      flight->publish_failure("no more data");
    }
    wait_for_verdict(*flight);
    EXPECT_THAT(
        error_of(*flight),
        HasSubstr("comm error: rank 1 of 3 failed: no more data"));
  });
}

// Another rank may have caused it, so all are compared before one is blamed.
TEST(FlightRecorder, ADeviceErrorIsComparedFirst) {
  run_ranks(2, [](RankContext& context) {
    const auto flight = recorder(context, {.timeout = 1s});
    std::string thrown;
    if (context.rank == 1) {
      try {
        flight->publish_failure("CUDA error: unspecified launch failure");
      } catch (const Error& error) {
        thrown = error.what();
      }
    } else {
      wait_for_verdict(*flight);
      thrown = error_of(*flight);
    }
    EXPECT_THAT(
        thrown,
        HasSubstr("rank 1 of 2 reports: CUDA error: unspecified launch "
                  "failure; every rank is alive"));
  });
}

TEST(FlightRecorder, AnExceptionThatLeavesIsAFailureToo) {
  run_ranks(2, [](RankContext& context) {
    std::shared_ptr<FlightRecorder> flight;
    try {
      const auto own = recorder(context);
      if (context.rank == 1) {
        throw std::runtime_error("gone");
      }
      flight = own;
    } catch (const std::runtime_error&) {
      return;
    }
    wait_for_verdict(*flight);
    EXPECT_THAT(
        error_of(*flight),
        HasSubstr("rank 1 of 2 failed: it exited with an exception"));
  });
}

TEST(FlightRecorder, AnErrorIsExplainedByTheRankThatCausedIt) {
  run_ranks(2, [](RankContext& context) {
    const auto flight = recorder(context, {.timeout = 1s});
    const auto group = silent_communicator();
    const int track = flight->watch(group, "g");
    if (context.rank == 0) {
      flight->begin(track, signature("a"));
      const Error seen = flight->explain(
          Error(ErrorCode::comm, "connection closed", "rank 0/2 | a"));
      EXPECT_THAT(
          seen.what(),
          AllOf(
              HasSubstr("[rank 0/2 | a]"),
              HasSubstr("rank 1 of 2 is late: it has not reached step 0, unit "
                        "a")));
      const Error mine(ErrorCode::usage, "wrong argument");
      EXPECT_EQ(flight->explain(mine).message(), "wrong argument");
      return;
    }
    wait_for_verdict(*flight);
  });
}

// The verdict still arrives, the program gets it, and nothing waits forever for
// the abort.
TEST(FlightRecorder, AnAbortThatHangsHoldsUpNobody) {
  std::promise<void> let_go;
  const auto released = let_go.get_future().share();
  std::atomic<int> num_told = 0;
  run_ranks(2, [&](RankContext& context) {
    std::promise<std::string> told;
    const auto flight = recorder(
        context,
        {.timeout = 400ms, .on_stuck_abort = [&](const Verdict& verdict) {
           num_told += 1;
           told.set_value(verdict.text);
         }});
    const auto group = std::make_shared<StuckCommunicator>(released);
    flight->watch(group, "g");
    if (context.rank == 1) {
      flight->publish_failure("the data loader broke");
    }
    wait_for_verdict(*flight);
    const auto says = HasSubstr("rank 1 of 2 failed: the data loader broke");
    EXPECT_THAT(error_of(*flight), says);
    EXPECT_THAT(told.get_future().get(), says);
  });
  EXPECT_EQ(num_told, 2);
  let_go.set_value();
}

// Dropping a graph may wait for an abort, and the abort then for the graph.
TEST(FlightRecorder, ActionsRunBesideTheAborts) {
  run_ranks(2, [](const RankContext& context) {
    std::promise<void> aborts;
    std::promise<void> acts;
    const auto acted = acts.get_future().share();
    const auto flight = recorder(context, {.timeout = 400ms});
    const auto group = std::make_shared<StuckCommunicator>(acted, &aborts);
    flight->watch(group, "g");
    const auto handle = flight->with_abort([&] {
      aborts.get_future().wait();
      acts.set_value();
    });
    if (context.rank == 1) {
      flight->publish_failure("the data loader broke");
    }
    wait_for_verdict(*flight);
    acted.wait();
    EXPECT_THAT(error_of(*flight), HasSubstr("the data loader broke"));
  });
}

TEST(FlightRecorder, RefusesByName) {
  const auto refusal = [](FlightRecorderOptions options, int world) {
    try {
      FlightRecorder(0, world, make_local_store(), at::kCPU, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(
      refusal({.timeout = 10ms}, 2),
      HasSubstr("timeout: expected at least 100 ms, got 10 ms"));
  EXPECT_THAT(
      refusal({.capacity = 3}, 2),
      HasSubstr("capacity: expected at least 16, got 3"));
  EXPECT_THAT(refusal({}, 1), HasSubstr("world > 1, got rank 0 of 1"));
  EXPECT_THAT(
      refusal({.connect_timeout = 50ms}, 3),
      HasSubstr("ranks 1-2 of 3 did not join within 50 ms"));
}

}  // namespace
}  // namespace flatshard
