#include "flatshard/report/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"

namespace flatshard::report {
namespace {

using ::flatshard::testing::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsNan;

// The second start of a run leaves such rows: from step 2 on, trained twice.
constexpr const char* kRows =
    R"({"step":0,"time":"2026-01-01T00:00:00.000Z","attempt":1,"start":{"steps":9,"ranks":2}}
{"step":1,"time":"2026-01-01T00:00:01.500Z","attempt":1,"loss":4.0,"mfu":null,"experts":{"load":1.5}}
{"step":2,"time":"2026-01-01T00:00:02.000Z","attempt":1,"loss":3.0}
{"step":2,"time":"2026-01-01T00:00:02.000Z","attempt":1,"checkpoint_s":0.5}
{"step":3,"time":"2026-01-01T00:00:03.000Z","attempt":1,"loss":2.5,"overtaken":true}
{"step":3,"time":"2026-01-01T00:00:03.000Z","attempt":1,"checkpoint_s":0.5,"overtaken":true}
{"step":3,"time":"2026-01-01T00:00:03.500Z","attempt":1,"nonfinite":"a","goes_on_after":2,"overtaken":true}
{"step":2,"time":"2026-01-01T00:01:00.000Z","attempt":2,"start":{"steps":9,"ranks":1}}
{"step":3,"time":"2026-01-01T00:01:01.000Z","attempt":2,"loss":null,"not_finite":{"loss":"nan"}}
{"step":3,"time":"2026-01-01T00:01:01.000Z","attempt":2,"validation_loss":2.0,"validation_losses":{"a/b":1.0}}
)";

class ReadRun : public ::testing::Test {
 protected:
  RunRecord read() const { return read_run(folder_.path(), "--run"); }

  const TempFolder folder_;
};

TEST_F(ReadRun, LeavesOutWhatWasTrainedAgain) {
  folder_.write("metrics.jsonl", kRows);
  const RunRecord run = read();
  EXPECT_THAT(run.warnings, ElementsAre(HasSubstr("config.toml")));
  EXPECT_THAT(run.training.steps(), ElementsAre(1, 2, 3));
  const auto& columns = run.training.columns();
  EXPECT_THAT(columns.at("loss"), ElementsAre(4, 3, IsNan()));
  EXPECT_THAT(columns.at("attempt"), ElementsAre(1, 1, 2));
  EXPECT_THAT(columns.at("experts.load"), ElementsAre(1.5, IsNan(), IsNan()));
  EXPECT_EQ(columns.at("time")[1] - columns.at("time")[0], 0.5);
  EXPECT_EQ(columns.count("not_finite.loss"), 0U);
  EXPECT_THAT(run.validation.steps(), ElementsAre(3));
  EXPECT_EQ(run.validation.columns().at("validation_losses.a/b")[0], 1);
  ASSERT_EQ(run.checkpoints.size(), 1U);
  EXPECT_EQ(run.checkpoints[0]["step"], 2);
  // Its history stays.
  EXPECT_EQ(run.starts.size(), 2U);
  EXPECT_EQ(run.starts[1]["start"]["ranks"], 1);
  EXPECT_EQ(run.nonfinite.size(), 1U);
  EXPECT_FALSE(run.ended);
}

TEST_F(ReadRun, RowsWithoutMarksReplaceEarlierOnesToo) {
  folder_.write(
      "metrics.jsonl",
      "{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":2}\n"
      "{\"step\":3,\"loss\":3}\n{\"step\":2,\"loss\":20}\n");
  EXPECT_THAT(read().training.columns().at("loss"), ElementsAre(1, 20));
}

TEST_F(ReadRun, ARunHasEndedUntilItIsStartedAgain) {
  folder_.write("config.toml", "[run]\n");
  folder_.write(
      "metrics.jsonl",
      "{\"step\":1,\"loss\":1}\n{\"step\":1,\"ended\":true}\n");
  EXPECT_TRUE(read().ended);
  EXPECT_THAT(read().warnings, IsEmpty());
  folder_.write(
      "metrics.jsonl",
      "{\"step\":1,\"loss\":1}\n{\"step\":1,\"ended\":true}\n"
      "{\"step\":1,\"start\":{}}\n");
  EXPECT_FALSE(read().ended);
}

TEST_F(ReadRun, DamagedLinesAreSkippedAndNamed) {
  folder_.write("config.toml", "[run]\nseed = \n");
  folder_.write(
      "metrics.jsonl",
      "{\"step\":1,\"loss\":1}\n{\"step\":2,\"lo\n[1]\n{\"loss\":1}\n"
      "{\"step\":\"3\"}\n{\"step\":4,\"loss\":4}\n");
  const RunRecord run = read();
  EXPECT_THAT(run.training.steps(), ElementsAre(1, 4));
  EXPECT_THAT(
      run.warnings,
      ElementsAre(
          HasSubstr("metrics.jsonl:2: skipped"),
          HasSubstr("metrics.jsonl:3: skipped"),
          HasSubstr("metrics.jsonl:4: skipped"),
          HasSubstr("metrics.jsonl:5: skipped"),
          HasSubstr("config.toml:2:")));
}

TEST_F(ReadRun, FieldsOfOtherTypesAreNoError) {
  folder_.write(
      "metrics.jsonl",
      "{\"step\":1,\"time\":5,\"loss\":\"x\",\"attempt\":[1]}\n"
      "{\"step\":2,\"time\":\"soon\",\"loss\":{\"a\":{\"b\":1}}}\n");
  const RunRecord run = read();
  EXPECT_THAT(run.training.steps(), ElementsAre(1, 2));
  EXPECT_THAT(run.training.columns().at("loss.a.b"), ElementsAre(IsNan(), 1));
}

TEST_F(ReadRun, WhatIsNoRunIsNamed) {
  EXPECT_THAT(
      message_of([] { read_run("/none/run", "--compare"); }),
      AllOf(
          HasSubstr("--compare /none/run: the directory does not exist"),
          HasSubstr("output_dir")));
  EXPECT_THAT(
      message_of([&] { read(); }),
      AllOf(HasSubstr("--run "), HasSubstr("it has no metrics.jsonl")));
  folder_.write("metrics.jsonl", "");
  EXPECT_THAT(message_of([&] { read(); }), HasSubstr("has no row of a run"));
  folder_.write("metrics.jsonl", "text\n");
  EXPECT_THAT(message_of([&] { read(); }), HasSubstr("has no row of a run"));
}

TEST(FlattenToml, HasFullNamesAndTypes) {
  const Json values = flatten_toml(
      "[a]\nx = 1\ny = 0.5\nz = true\nt = \"text\"\n"
      "list = [{path = \"p\", weight = 2}]\n[b]\nx = 3\n",
      "config.toml");
  EXPECT_EQ(values["a.x"], 1);
  EXPECT_EQ(values["a.y"], 0.5);
  EXPECT_EQ(values["a.z"], true);
  EXPECT_EQ(values["a.t"], "text");
  EXPECT_EQ(values["a.list"][0]["path"], "p");
  EXPECT_EQ(values["b.x"], 3);
  EXPECT_THAT(
      message_of([] { flatten_toml("[a]\nx = \n", "c.toml"); }),
      HasSubstr("c.toml:2: "));
}

TEST(SecondsOf, ReadsUtcToTheMillisecond) {
  EXPECT_EQ(seconds_of("1970-01-02T00:00:01.250Z"), 86401.25);
  EXPECT_EQ(seconds_of("yesterday"), 0);
}

}  // namespace
}  // namespace flatshard::report
