#include "flatshard/flight/diagnosis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

FlightEntry entry(
    std::int64_t seq,
    const std::string& unit,
    CollectiveState state,
    std::int64_t age_ms = 0,
    std::int64_t numel = 64) {
  return {
      .seq = seq,
      .signature =
          {.kind = CollectiveKind::all_gather,
           .numel = numel,
           .dtype = at::kFloat,
           .unit = unit},
      .step = 7,
      .state = state,
      .age_ms = age_ms};
}

FlightTrack track(std::vector<FlightEntry> entries, std::string name = "dp") {
  const std::int64_t launched = entries.empty() ? 0 : entries.back().seq + 1;
  return {
      "mesh/" + name,
      name,
      launched,
      /*num_queued=*/launched,
      {},
      std::move(entries)};
}

RankView rank(int index, std::vector<FlightTrack> tracks) {
  RankView view;
  view.state = {
      .rank = index,
      .host = "node" + std::to_string(index),
      .pid = 100 + index,
      .tracks = std::move(tracks)};
  view.seen = true;
  return view;
}

constexpr auto kDone = CollectiveState::completed;
constexpr auto kStarted = CollectiveState::started;
constexpr auto kScheduled = CollectiveState::scheduled;

RankView waiting(int index) {
  return rank(
      index,
      {track({entry(4, "a", kDone, 3000), entry(5, "b", kStarted, 2900)})});
}

TEST(FlightState, TextComesBackAsItWas) {
  FlightState state = this_process(3);
  state.beat = 12;
  state.status = RankStatus::troubled;
  state.message = "two\nlines\tand a tab";
  state.step = 7;
  state.dump = 2;
  state.tracks = {track({entry(5, "layers.1", kScheduled, 12)})};
  state.tracks[0].checkpoints = {{64, 0xFFFFFFFFFFFFFFFFULL}, {128, 7}};
  const FlightState again = parse_flight_state(serialize(state));
  EXPECT_EQ(again.message, "two lines and a tab");
  EXPECT_EQ(again.pid, ::getpid());
  EXPECT_EQ(again.process_space, state.process_space);
  EXPECT_EQ(again.tracks[0].checkpoints, state.tracks[0].checkpoints);
  EXPECT_EQ(
      again.tracks[0].entries[0].signature,
      state.tracks[0].entries[0].signature);
  EXPECT_EQ(serialize(again), serialize(parse_flight_state(serialize(again))));
  EXPECT_EQ(process_state(again), ProcessState::running);
}

TEST(FlightState, OtherTextIsRefused) {
  for (const char* text : {"R\t1", "E\t1\n", "T\ta\tb\tc"}) {
    try {
      parse_flight_state(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::comm);
      EXPECT_THAT(error.what(), HasSubstr("published state: expected"));
    }
  }
}

TEST(FlightState, ProcessesAreLookedUpOnThisMachineOnly) {
  FlightState state = this_process(0);
  state.process_start += 1;  // the pid belongs to somebody else now
  EXPECT_EQ(process_state(state), ProcessState::gone);
  state.process_space = "another boot";
  EXPECT_EQ(process_state(state), ProcessState::unknown);
}

TEST(FlightDiagnosis, TheLongestSilentRankIsMissing) {
  std::vector<RankView> views{waiting(0), waiting(1), waiting(2), waiting(3)};
  views[1].missing = views[3].missing = true;
  views[1].silent = 2s;
  views[3].silent = 3s;
  const Verdict verdict = diagnose(views, 2s);
  EXPECT_EQ(verdict.code, ErrorCode::timeout);
  EXPECT_EQ(verdict.num_missing, 2);
  EXPECT_THAT(
      verdict.text,
      AllOf(
          HasSubstr("rank 3 of 4 is missing: no heartbeat for 3.0 s"),
          HasSubstr("process 103 on host node3"),
          HasSubstr("missing are ranks 1, 3"),
          HasSubstr("ranks 0, 2 wait for 2.9 s in step 7, unit b: "
                    "all_gather of 64 Float (dp #5)")));
  views[1].process = ProcessState::gone;  // known, so it comes first
  const Verdict gone = diagnose(views, 2s);
  EXPECT_EQ(gone.code, ErrorCode::comm);
  EXPECT_THAT(gone.text, HasSubstr("rank 1 of 4 is missing"));
}

TEST(FlightDiagnosis, ARankThatNeverCame) {
  std::vector<RankView> views{waiting(0), RankView{}};
  views[1].state.rank = 1;
  views[1].missing = true;
  views[1].silent = 60s;
  EXPECT_THAT(
      diagnose(views, 2s).text,
      AllOf(
          HasSubstr("rank 1 of 2 is missing: it has not arrived within 60.0 s"),
          HasSubstr("never came")));
}

TEST(FlightDiagnosis, AFailedRankComesBeforeAllElse) {
  std::vector<RankView> views{waiting(0), waiting(1), waiting(2)};
  views[1].missing = true;
  views[2].state.status = RankStatus::failed;
  views[2].state.message = "out of memory";
  EXPECT_THAT(
      diagnose(views, 2s).text,
      HasSubstr("rank 2 of 3 failed: out of memory"));
}

TEST(FlightDiagnosis, TheFirstDifferenceIsNamed) {
  const auto with = [](int index, const std::string& unit, std::int64_t numel) {
    return rank(
        index,
        {track(
            {entry(3, "x", kDone),
             entry(4, unit, kDone, 0, numel),
             entry(5, "y" + unit, kStarted, 3000)})});
  };
  // Rank 1 is the odd one, although rank 0 comes first.
  const std::vector<RankView> views{
      with(0, "a", 64),
      with(1, "b", 64),
      with(2, "a", 64)};
  const Verdict verdict = diagnose(views, 2s);
  EXPECT_EQ(verdict.code, ErrorCode::comm);
  EXPECT_THAT(
      verdict.text,
      AllOf(
          HasSubstr("rank 1 issues the collective of another unit at dp #4"),
          HasSubstr("it is in step 7, unit b: all_gather of 64 Float"),
          HasSubstr("ranks 0, 2 in step 7, unit a")));
  // With two ranks the second is the other one.
  const std::vector<RankView> two{with(0, "a", 64), with(1, "a", 128)};
  EXPECT_THAT(
      diagnose(two, 2s).text,
      HasSubstr("rank 1 issues another size at dp #4"));
}

TEST(FlightDiagnosis, TheLateRankIsTheOneThatWaitsNowhere) {
  const std::vector<RankView> views{
      waiting(0),
      // Rank 2 blocks it in another group.
      rank(
          1,
          {track({entry(4, "a", kDone, 3000)}),
           track({entry(8, "c", kStarted, 2950)}, "outer")}),
      rank(
          2,
          {track({entry(4, "a", kDone, 3000)}),
           track({entry(7, "b", kDone, 3100)}, "outer")})};
  const Verdict verdict = diagnose(views, 2s);
  EXPECT_EQ(verdict.code, ErrorCode::timeout);
  EXPECT_THAT(
      verdict.text,
      AllOf(
          HasSubstr("rank 2 of 3 is late: it has not reached step 7, unit c"),
          HasSubstr("(outer #8)"),
          HasSubstr("it runs, in no collective for 3.1 s, after step 7")));
}

TEST(FlightDiagnosis, WaitingInACircleNamesBothPlaces) {
  const std::vector<RankView> views{
      rank(
          0,
          {track({entry(4, "a", kStarted, 3000)}, "gather"),
           track({}, "reduce")}),
      rank(
          1,
          {track({}, "gather"),
           track({entry(4, "b", kStarted, 2000)}, "reduce")})};
  EXPECT_THAT(
      diagnose(views, 2s).text,
      AllOf(
          HasSubstr("rank 1 of 2 is late"),
          HasSubstr("(gather #4)"),
          HasSubstr("since it waits in step 7, unit b"),
          HasSubstr("(reduce #4)")));
}

TEST(FlightDiagnosis, RanksThatTookDifferentPathsAreNamed) {
  std::vector<RankView> views{
      rank(
          0,
          {track({entry(4, "a", kStarted, 3000)}, "gather"),
           track({entry(2, "a", kDone, 3100)}, "reduce")}),
      rank(
          1,
          {track({entry(3, "a", kDone, 3000)}, "gather"),
           track({entry(3, "b", kStarted, 2000)}, "reduce")})};
  // The one that has not waited for long may yet move.
  views[0].waits = true;
  EXPECT_FALSE(programs_part(views));
  views[1].waits = true;
  EXPECT_TRUE(programs_part(views));
  const Verdict verdict = diagnose(views, 10s);
  EXPECT_EQ(verdict.code, ErrorCode::comm);
  EXPECT_THAT(
      verdict.text,
      AllOf(
          HasSubstr("ranks 0 and 1 followed different paths: rank 0 waits in "
                    "step 7, unit a: all_gather of 64 Float (gather #4), and "
                    "rank 1 waits in step 7, unit b: all_gather of 64 Float "
                    "(reduce #3); all ranks must run the same units"),
          HasSubstr("output times zero to the loss")));
  // One has queued less than the other on both groups, so it is late.
  views[1].state.tracks[1].num_queued = 3;
  views[0].state.tracks[1].num_queued = 3;
  EXPECT_FALSE(programs_part(views));
  // A rank that is only in other groups proves nothing.
  views[1].state.tracks[1].num_queued = 4;
  views[1].state.tracks[1].group = "another";
  EXPECT_FALSE(programs_part(views));
}

TEST(FlightDiagnosis, WhoeverEndedItsRunComesNoMore) {
  std::vector<RankView> views{waiting(0), waiting(1)};
  EXPECT_FALSE(waits_for_who_left(views));
  views[1] = rank(1, {track({entry(4, "a", kDone, 3000)})});
  views[1].state.status = RankStatus::left;
  EXPECT_FALSE(waits_for_who_left(views));  // not for long
  views[0].waits = true;
  EXPECT_TRUE(waits_for_who_left(views));
  const Verdict verdict = diagnose(views, 10s);
  EXPECT_EQ(verdict.code, ErrorCode::comm);
  EXPECT_THAT(
      verdict.text,
      AllOf(
          HasSubstr("rank 1 of 2 has ended its run: it has not reached step "
                    "7, unit b"),
          HasSubstr("all ranks must run the same number of steps")));
  views[1] = waiting(1);  // it left after that collective
  views[1].state.status = RankStatus::left;
  EXPECT_FALSE(waits_for_who_left(views));
}

// All have launched it. The device of one does not reach it.
TEST(FlightDiagnosis, ADeviceThatDoesNotComeIsNamed) {
  std::vector<RankView> views{waiting(0), waiting(1), waiting(2)};
  views[1].state.tracks[0].entries[1].state = kScheduled;
  const Verdict verdict = diagnose(views, 2s);
  EXPECT_EQ(verdict.code, ErrorCode::timeout);
  EXPECT_THAT(
      verdict.text,
      HasSubstr("rank 1 of 3 is late: its device has not reached step 7, unit "
                "b: all_gather of 64 Float (dp #5); ranks 0, 2 wait there for "
                "2.9 s"));
}

TEST(FlightDiagnosis, NobodyLateIsTheNetwork) {
  const std::vector<RankView> views{waiting(0), waiting(1)};
  EXPECT_THAT(
      diagnose(views, 2s).text,
      AllOf(
          HasSubstr("every rank is alive and reached the same collective"),
          HasSubstr("ranks 0-1 wait for 2.9 s in step 7, unit b")));
  std::vector<RankView> troubled = views;
  troubled[1].state.status = RankStatus::troubled;
  troubled[1].state.message = "connection reset";
  EXPECT_THAT(
      diagnose(troubled, 2s).text,
      HasSubstr("rank 1 of 2 reports: connection reset"));
}

TEST(FlightDiagnosis, CheckpointsOfOneGroupAreCompared) {
  std::vector<RankView> views{waiting(0), waiting(1)};
  views[0].state.tracks[0].checkpoints = {{64, 1}, {128, 2}};
  views[1].state.tracks[0].checkpoints = {{128, 2}, {192, 9}};
  EXPECT_FALSE(checkpoints_differ(views));
  views[1].state.tracks[0].checkpoints = {{128, 3}};
  EXPECT_TRUE(checkpoints_differ(views));
  // The rings have forgotten it: the place is known to a checkpoint.
  EXPECT_THAT(
      diagnose(views, 2s).text,
      HasSubstr(
          "rank 1 issued other collectives than the others between dp #64 "
          "and #128"));
  views[1].state.tracks[0].group = "another";
  EXPECT_FALSE(checkpoints_differ(views));
}

TEST(FlightDiagnosis, RanksThatDidTheSameShareARow) {
  std::vector<RankView> views;
  for (int r = 0; r < 8; ++r) {
    views.push_back(waiting(r));
  }
  views[5] = rank(5, {track({entry(4, "a", kDone, 1000)})});
  EXPECT_EQ(
      flight_table(views, "mesh/dp"),
      "  rank      step  unit  collective  communicator  #  elements  dtype  "
      "state      for\n"
      "  0-4, 6-7  7     b     all_gather  dp            5  64        Float  "
      "started    2.9 s\n"
      "  5         7     a     all_gather  dp            4  64        Float  "
      "completed  1.0 s");
}

TEST(FlightDiagnosis, VerdictsTravelAsText) {
  const Verdict verdict{ErrorCode::comm, 2, "a\tb\nc"};
  EXPECT_EQ(parse_verdict(serialize(verdict)), verdict);
  EXPECT_THROW(parse_verdict("nothing"), Error);
}

}  // namespace
}  // namespace flatshard
