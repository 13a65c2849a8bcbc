// Collectives of a graph are launched by each replay, and have progressed as
// far as the graph's numbers show.
#include "flatshard/flight/captured.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "flatshard/flight/ring.h"

namespace flatshard {
namespace {

using detail::FlightRing;

CollectiveSignature gather_of(const std::string& unit) {
  return {
      .kind = CollectiveKind::all_gather,
      .numel = 8,
      .dtype = at::kFloat,
      .unit = unit};
}

void run(FlightRing& ring, int track, const std::string& unit) {
  const auto ticket = ring.begin(track, gather_of(unit), 1);
  if (ticket.captured) {
    ring.launched(ticket);  // a graph's stream, marked as such
  } else {
    ring.completed(ticket);
  }
}

// A launch of the graph that ends when the test sets it.
class Launch {
 public:
  Launch() : stream_(make_stream(at::kCPU, "graph")) {
    stream_->submit([end = end_.get_future().share()] { end.wait(); });
    done_.record(*stream_);
  }
  ~Launch() {
    if (!ended_) {
      finish();
    }
  }
  const Event& done() const { return done_; }
  void finish() {
    ended_ = true;
    end_.set_value();
    stream_->synchronize();
  }

 private:
  std::promise<void> end_;
  bool ended_ = false;
  std::shared_ptr<Stream> stream_;
  Event done_;
};

// "completed started scheduled" of a track's newest.
std::string states(FlightRing& ring, int track, int count) {
  std::string text;
  for (const FlightEntry& entry : ring.tracks(count)[track].entries) {
    text += std::string(text.empty() ? "" : " ") +
            std::string(to_string(entry.state));
  }
  return text;
}

class CapturedCollectivesTest : public ::testing::Test {
 protected:
  CapturedCollectivesTest() {
    ring_.add_track("mesh/a", "a");
    ring_.add_track("mesh/b", "b");
    run(ring_, 0, "before");
    captured_ = ring_.make_captured();
    ring_.begin_capture(captured_);
    run(ring_, 0, "one");
    run(ring_, 1, "one");
    run(ring_, 0, "two");
    run(ring_, 0, "three");
    ring_.end_capture(/*failed=*/false);
  }

  void device_is_at(std::uint32_t begun, std::uint32_t ended) {
    captured_->running().write(1);
    captured_->tracks()[0].begun->write(begun);
    captured_->tracks()[0].ended->write(ended);
  }

  FlightRing ring_{at::kCPU, 16};
  std::shared_ptr<CapturedCollectives> captured_;
};

TEST_F(CapturedCollectivesTest, ARecordingLaunchesNothing) {
  EXPECT_EQ(ring_.tracks(16)[0].num_launched, 1);
  EXPECT_EQ(ring_.tracks(16)[1].num_launched, 0);
  run(ring_, 0, "behind it");
  EXPECT_EQ(ring_.tracks(16)[0].num_launched, 2);
}

TEST_F(CapturedCollectivesTest, AReplayLaunchesWhatAnEagerStepDoes) {
  Launch launch;
  ring_.replayed(captured_, 7, launch.done());
  launch.finish();
  FlightRing eager(at::kCPU, 16);
  eager.add_track("mesh/a", "a");
  run(eager, 0, "before");
  for (const char* unit : {"one", "two", "three"}) {
    run(eager, 0, unit);
  }
  const auto graphs = ring_.tracks(16)[0];
  const auto expected = eager.tracks(16)[0];
  ASSERT_EQ(graphs.num_launched, expected.num_launched);
  for (std::size_t i = 0; i < expected.entries.size(); ++i) {
    EXPECT_EQ(graphs.entries[i].signature, expected.entries[i].signature);
    EXPECT_EQ(graphs.entries[i].state, CollectiveState::completed);
  }
  EXPECT_EQ(graphs.entries.back().step, 7);
}

TEST_F(CapturedCollectivesTest, AGraphSaysHowFarItIs) {
  Launch launch;
  ring_.replayed(captured_, 7, launch.done());
  EXPECT_EQ(states(ring_, 0, 3), "scheduled scheduled scheduled");
  device_is_at(0, 0);
  EXPECT_EQ(states(ring_, 0, 3), "scheduled scheduled scheduled");
  device_is_at(1, 0);
  EXPECT_EQ(states(ring_, 0, 3), "started scheduled scheduled");
  device_is_at(2, 2);
  EXPECT_EQ(states(ring_, 0, 3), "completed completed scheduled");
  device_is_at(3, 2);
  EXPECT_EQ(states(ring_, 0, 3), "completed completed started");
  launch.finish();
  EXPECT_EQ(states(ring_, 0, 3), "completed completed completed");
}

// The host is a replay ahead: the graph's last numbers are from the first one.
TEST_F(CapturedCollectivesTest, NumbersAreThoseOfTheReplayThatRuns) {
  Launch first;
  Launch second;
  ring_.replayed(captured_, 7, first.done());
  ring_.replayed(captured_, 8, second.done());
  device_is_at(3, 2);
  EXPECT_EQ(
      states(ring_, 0, 6),
      "completed completed started scheduled scheduled scheduled");
  device_is_at(3, 3);
  EXPECT_EQ(
      states(ring_, 0, 6),
      "completed completed completed scheduled scheduled scheduled");
  first.finish();
  captured_->running().write(0);  // the second has not begun
  EXPECT_EQ(states(ring_, 0, 3), "scheduled scheduled scheduled");
  device_is_at(1, 0);
  EXPECT_EQ(states(ring_, 0, 3), "started scheduled scheduled");
}

TEST(CapturedCollectives, AStepLongerThanTheRingIsKept) {
  FlightRing ring(at::kCPU, 16);
  ring.add_track("mesh/a", "a");
  for (int i = 0; i < 20; ++i) {
    run(ring, 0, "before");
  }
  const auto captured = ring.make_captured();
  ring.begin_capture(captured);
  for (int i = 0; i < 100; ++i) {
    run(ring, 0, std::to_string(i));
  }
  ring.end_capture(/*failed=*/false);
  Launch launch;
  ring.replayed(captured, 7, launch.done());
  captured->running().write(1);
  captured->tracks()[0].begun->write(2);
  captured->tracks()[0].ended->write(1);
  const FlightTrack track = ring.tracks(4)[0];
  EXPECT_EQ(track.num_launched, 120);
  ASSERT_NE(track.pending(), nullptr);
  EXPECT_EQ(track.pending()->seq, 21);
  EXPECT_EQ(track.pending()->signature.unit, "1");
  EXPECT_EQ(track.pending()->state, CollectiveState::started);
}

}  // namespace
}  // namespace flatshard
