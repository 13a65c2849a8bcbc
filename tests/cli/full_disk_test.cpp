// No room for what a run writes: see bad_input_test.cpp.
#include "tests/cli/bad_input.h"

#include <gmock/gmock.h>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Blocks of 512 bytes. The limit applies to every file the program writes.
std::string limit(int blocks) {
  return fmt::format(
      "export GCOV_PREFIX='{}'\nulimit -f {}\n",
      counts_of_cut_off(),
      blocks);
}

TEST_F(BadInput, NoRoomForTheWeights) {
  const Result result = sh(limit(40) + train(""));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("run.output_dir"),
          HasSubstr("model.safetensors"),
          HasSubstr("ulimit -f")));
  expect_earlier_run_kept();
}

TEST_F(BadInput, NoRoomForTheMetrics) {
  const Result result = sh(limit(8) + train("--set training.steps=100"));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("run.output_dir"), HasSubstr("metrics.jsonl")));
  expect_earlier_run_kept();
  const std::string metrics = read(folder_ / "run/metrics.jsonl");
  EXPECT_GT(metrics.size(), 1000U);
  EXPECT_LE(metrics.size(), 8U * 512U);
}

TEST_F(BadInput, NoRoomForTheConfig) {
  const Result result = sh(limit(1) + train(""));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("run.output_dir"), HasSubstr("config.toml")));
  EXPECT_EQ(snapshot(folder_ / "run"), earlier_);
}

TEST_F(BadInput, NoRoomForACorpus) {
  const auto corpus = snapshot(folder_ / "corpus");
  const Result result = sh(fmt::format(
      "{1}\"$PROGRAM\" data prepare --force --input '{0}/texts' "
      "--output '{0}/corpus'",
      folder_.path().string(),
      limit(4)));
  expect_one_error(result);
  EXPECT_EQ(snapshot(folder_ / "corpus"), corpus);
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_THAT(
        (std::vector<std::string>{"texts", "corpus", "run", "run.toml"}),
        ::testing::Contains(entry.path().filename().string()));
  }
}

// A file system that is really full, where the test may make one.
TEST_F(BadInput, AFullDisk) {
  const std::string mount = fmt::format(
      "unshare -m sh -c 'mount -t tmpfs -o size=220k none {}/run",
      folder_.path().string());
  if (sh(mount + "'").code != 0) {
    GTEST_SKIP() << "needs root and unshare to mount a tmpfs";
  }
  const std::string earlier = (shared_->path() / "run").string();
  const std::string run = (folder_ / "run").string();
  // The weights have 150 kB: one set of the earlier run fits, two do not.
  const Result result = sh(fmt::format(
      "{} && cp -r {}/* {}/ && {{ {}; code=$?; }}; cmp {}/model.safetensors "
      "{}/earlier/1/model.safetensors && echo weights are whole; cmp "
      "{}/metrics.jsonl {}/earlier/1/metrics.jsonl && echo rows are whole; "
      "find {} -name \"*.tmp-*\" -exec echo a temporary file stays {{}} +; "
      "exit $code'",
      mount,
      earlier,
      run,
      std::regex_replace(train(""), std::regex("'"), ""),
      earlier,
      run,
      earlier,
      run,
      run));
  expect_one_error(result);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("run.output_dir"),
          HasSubstr("No space left"),
          HasSubstr("weights are whole"),
          HasSubstr("rows are whole"),
          ::testing::Not(HasSubstr("a temporary file stays"))));
}

}  // namespace
}  // namespace flatshard::testing
