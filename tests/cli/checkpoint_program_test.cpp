// Checkpoints as a user meets them: resume, signals, kill -9, export.
#include "tests/cli/bad_input.h"
#include "tests/support/sum_order.h"

#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"

#include <gmock/gmock.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Checkpoints : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    corpus_ = new TempFolder;
    prepare_corpus(*corpus_);
  }
  static void TearDownTestSuite() { delete corpus_; }

  /// Returns a config of `steps` steps in `<name>`; global batch 6, so that 1,
  /// 2 and 3 ranks train on the same samples.
  std::string write_config(const std::string& name) const {
    return folder_
        .write(
            name + ".toml",
            fmt::format(
                R"([run]
output_dir = "{}"
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 64
vocab_size = 257
[data]
train = "{}"
[training]
steps = 40
seq_len = 33
local_batch_size = 1
global_batch_size = 6
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 1
[precision]
compute = "float32"
[checkpoint]
interval = 20
[metrics]
log_freq = 1
)",
                (folder_ / name).string(),
                (*corpus_ / "corpus").string()))
        .string();
  }

  static std::string
  train(const std::string& config, int ranks, const std::string& more = {}) {
    return fmt::format(
        "\"$PROGRAM\" train '{}' --device cpu --nproc {} {}",
        config,
        ranks,
        more);
  }

  Result run(const std::string& name, int ranks, const std::string& more = {})
      const {
    return sh(train(write_config(name), ranks, more));
  }

  /// Returns lines of a shell: `command` as $pid, until its log has `text` or
  /// it ended. An earlier command's log is removed first, so its text is not
  /// found.
  /// @param max_tries  10 ms each.
  std::string start(
      const std::string& command,
      const std::string& text,
      int max_tries = 1'000'000) const {
    return fmt::format(
        ": > '{0}'\n"
        "exec {1} > '{0}' 2>&1 & pid=$!\n"
        "n=0; while [ $n -lt {3} ] && kill -0 $pid 2>/dev/null && "
        "! grep -q '{2}' '{0}'; do sleep 0.01; n=$((n+1)); done\n",
        log().string(),
        command,
        text,
        max_tries);
  }
  fs::path log() const { return folder_ / "log"; }

  std::string weights(const std::string& name) const {
    return read(folder_ / name / "model.safetensors");
  }

  /// Returns the losses by step; of a step that was trained again the last one.
  std::map<int, double> losses(const std::string& name) const {
    std::ifstream file(folder_ / name / "metrics.jsonl");
    std::map<int, double> losses;
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.contains("loss")) {
        losses[row["step"]] = row["loss"];
      }
    }
    return losses;
  }

  std::vector<std::int64_t> steps(const std::string& name) const {
    return list_checkpoints(folder_ / name / "checkpoints");
  }

  static inline TempFolder* corpus_ = nullptr;
  TempFolder folder_;
};

TEST_F(Checkpoints, FortyStepsAreTwentyAndTwenty) {
  const Result whole = run("whole", 2);
  ASSERT_EQ(whole.code, 0) << whole.output;
  EXPECT_THAT(steps("whole"), ElementsAre(20, 40));
  EXPECT_THAT(whole.output, HasSubstr("two buffers"));

  // Stops after step 20, as if the allocation had ended.
  for (const char* name : {"same", "fewer", "more"}) {
    fs::create_directories(folder_ / name / "checkpoints");
    fs::copy(
        step_folder(folder_ / "whole" / "checkpoints", 20),
        step_folder(folder_ / name / "checkpoints", 20));
  }
  const Result same = run("same", 2, "--resume");
  ASSERT_EQ(same.code, 0) << same.output;
  EXPECT_THAT(
      same.output,
      AllOf(
          HasSubstr("loaded "),
          HasSubstr("step: 21/40 "),
          Not(HasSubstr("step: 20/"))));
  EXPECT_TRUE(weights("same") == weights("whole"));
  // Other numbers of ranks see the same samples; sums round differently.
  const auto expected = losses("whole");
  const double tolerance = testing::sum_tolerance(
      {.addends = 6 * 33,  // tokens of a step
       .in_a_row = testing::sums_of_steps(/*layers=*/2, 40)});
  for (const auto& [name, ranks] :
       std::map<std::string, int>{{"fewer", 1}, {"more", 3}}) {
    const Result resumed = run(name, ranks, "--resume");
    ASSERT_EQ(resumed.code, 0) << resumed.output;
    const auto found = losses(name);
    ASSERT_EQ(found.size(), 20u);
    for (const auto& [step, loss] : found) {
      EXPECT_NEAR(loss, expected.at(step), tolerance) << name << " " << step;
    }
  }
  // Losses at float32 agree that closely only on the same samples.
  EXPECT_GT(std::abs(expected.at(21) - expected.at(22)), tolerance);
}

TEST_F(Checkpoints, ResumeWithoutACheckpointStarts) {
  const Result result = run("new", 1, "--resume --set training.steps=5");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("starting from the first step"),
          HasSubstr("step: 1/5 ")));
  // There is one now, and nothing left to do or to write.
  fs::remove(folder_ / "new" / "config.toml");
  const auto files = snapshot(folder_ / "new");
  for (const int steps : {5, 3}) {
    const Result again =
        run("new", 1, fmt::format("--resume --set training.steps={}", steps));
    ASSERT_EQ(again.code, 0) << again.output;
    EXPECT_THAT(
        again.output,
        AllOf(
            HasSubstr("nothing is left to do"),
            HasSubstr(fmt::format("training.steps = {}", steps)),
            Not(HasSubstr("model: "))));
    EXPECT_EQ(snapshot(folder_ / "new"), files);
  }
  // A run that was killed between its last checkpoint and its weights.
  fs::remove(folder_ / "new" / "metrics.jsonl");
  fs::remove(folder_ / "new" / "model.safetensors");
  const Result late = run("new", 1, "--resume --set training.steps=5");
  ASSERT_EQ(late.code, 0) << late.output;
  EXPECT_TRUE(weights("new") == files.at("model.safetensors"));
}

// Whatever can fail has gone well before a file of the earlier run moves.
TEST_F(Checkpoints, ARunThatFailsAtItsStartMovesNothing) {
  ASSERT_EQ(run("run", 2, "--set training.steps=3").code, 0);
  const auto files = snapshot(folder_ / "run");
  for (const char* change :
       {"--set model.init_from=/nowhere",
        "--set parallelism.memory_budget=0.0000001"}) {
    const Result failed = run("run", 2, change);
    EXPECT_EQ(failed.code, 1) << failed.output;
    EXPECT_EQ(failed.errors().size(), 1u) << failed.output;
    EXPECT_EQ(snapshot(folder_ / "run"), files) << change;
  }
  // A restart does not resume from another run's checkpoints.
  const Result again =
      run("run", 2, "--max-restarts 1 --set model.init_from=/nowhere");
  EXPECT_THAT(again.output, HasSubstr("restart 1 of 1, from the first step"));
  EXPECT_EQ(snapshot(folder_ / "run"), files);
  const Result resumed = run("run", 2, "--resume --set training.steps=4");
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  EXPECT_THAT(
      resumed.output,
      AllOf(HasSubstr("step: 4/4 "), Not(HasSubstr("step: 3/"))));
}

TEST_F(Checkpoints, ASecondRunInTheFolderIsRefused) {
  const std::string config = write_config("shared");
  const auto second = [&](const std::string& more) {
    return fmt::format(
        "{0} > '{1}.{2}' 2>&1; echo $? >> '{1}.{2}'",
        train(config, 2, more),
        log().string(),
        more.size());
  };
  const Result first = sh(fmt::format(
      "{}{}\n{}\n"
      "kill -0 $pid && kill -KILL $pid $(pgrep -P $pid); wait $pid; "
      "cat '{}/run.lock'",
      start(
          train(config, 2, "--set training.steps=100000"),
          "checkpoints/step-20 in"),
      second(""),
      second("--resume"),
      (folder_ / "shared").string()));
  for (const char* name : {"log.0", "log.8"}) {
    const std::string refused = read(folder_ / name);
    EXPECT_THAT(
        refused,
        AllOf(
            HasSubstr("another run writes to " + (folder_ / "shared").string()),
            HasSubstr(": process "),
            HasSubstr("started at 20"),
            HasSubstr("run.output_dir"),
            ::testing::EndsWith("\n1\n")));
  }
  EXPECT_FALSE(fs::exists(folder_ / "shared" / "earlier"));
  // A killed process has no lock any more, although the file still exists.
  EXPECT_THAT(first.output, HasSubstr("\"process\":"));
  const Result next = run("shared", 2, "--set training.steps=2");
  EXPECT_EQ(next.code, 0) << next.output;
  EXPECT_FALSE(fs::exists(folder_ / "shared" / "run.lock"));
}

TEST_F(Checkpoints, OtherRanksKeepTheBatch) {
  const std::string derived = "--set training.global_batch_size=-1 "
                              "--set training.local_batch_size=4 ";
  ASSERT_EQ(run("run", 2, derived + "--set training.steps=4").code, 0);
  const auto samples = [&](int step) {
    const Manifest manifest =
        read_manifest(step_folder(folder_ / "run" / "checkpoints", step));
    return nlohmann::json::parse(
               manifest.state.at("loader"))["samples_consumed"]
        .get<int>();
  };
  ASSERT_EQ(samples(4), 4 * 8);
  const std::string resume = "--resume " + derived;
  const Result one = run("run", 1, resume + "--set training.steps=6");
  ASSERT_EQ(one.code, 0) << one.output;
  EXPECT_EQ(samples(6), 6 * 8);
  EXPECT_THAT(
      one.output,
      AllOf(
          HasSubstr("training.global_batch_size = 8, as in the checkpoint"),
          HasSubstr("2 microbatches per step")));
  const Result three = run("run", 3, resume + "--set training.steps=8");
  EXPECT_EQ(three.code, 1);
  EXPECT_EQ(three.errors().size(), 1u) << three.output;
  EXPECT_THAT(
      three.output,
      AllOf(
          HasSubstr("trained with 8 sequences per step"),
          HasSubstr("4 * 3 = 12"),
          HasSubstr("set training.global_batch_size to a number")));
  const Result number = run(
      "run",
      3,
      resume + "--set training.steps=8 --set training.global_batch_size=12");
  ASSERT_EQ(number.code, 0) << number.output;
  EXPECT_EQ(samples(8), 6 * 8 + 2 * 12);
}

TEST_F(Checkpoints, ANewRunPutsOldCheckpointsAside) {
  ASSERT_EQ(run("twice", 1, "--set training.steps=3").code, 0);
  ASSERT_EQ(run("twice", 1, "--set training.steps=2").code, 0);
  EXPECT_THAT(steps("twice"), ElementsAre(2));
  EXPECT_THAT(
      list_checkpoints(folder_ / "twice" / "earlier" / "1" / "checkpoints"),
      ElementsAre(3));
}

TEST_F(Checkpoints, AnotherCorpusOrSeedIsRefused) {
  ASSERT_EQ(run("run", 1, "--set training.steps=3").code, 0);
  for (const char* change : {"run.seed=2", "training.seq_len=20"}) {
    const Result result =
        run("run", 2, fmt::format("--resume --set {}", change));
    EXPECT_EQ(result.code, 1) << result.output;
    EXPECT_EQ(result.errors().size(), 1u) << result.output;
  }
  // But what is excluded does not matter.
  const Result result =
      run("run",
          2,
          "--resume --set run.seed=2 --set checkpoint.exclude=loader "
          "--set training.steps=4");
  EXPECT_EQ(result.code, 0) << result.output;
  const Result missing = run("run", 1, "--set checkpoint.load_step=7");
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(
      missing.output,
      AllOf(HasSubstr("checkpoint.load_step"), HasSubstr("step-7")));
}

/// Reads every byte and compares checksums, as `flatshard checkpoint verify`.
void verify(const fs::path& folder) {
  const Manifest manifest = read_manifest(folder);
  check_files(folder, manifest);
  read_chunks(folder, manifest, plan_whole_files(manifest), {}, 1);
}

/// A run of two ranks that saves each step is killed at a step, and again six
/// steps later.
class KillNine : public Checkpoints,
                 public ::testing::WithParamInterface<int> {};

TEST_P(KillNine, LosesNothingThatWasSaved) {
  ASSERT_EQ(run("whole", 2).code, 0);
  const std::string config = write_config("killed");
  std::string options = "--set checkpoint.interval=1 ";
  for (const int step : {GetParam(), GetParam() + 6}) {
    sh(start(
           train(config, 2, options),
           fmt::format("step: {}/40  loss", step),
           2000) +
       "pkill -KILL -P $pid; kill -KILL $pid; wait $pid\n");
    options += "--resume ";
    for (const std::int64_t saved : steps("killed")) {
      const fs::path folder =
          step_folder(folder_ / "killed" / "checkpoints", saved);
      EXPECT_NO_THROW(verify(folder)) << folder;
    }
  }
  ASSERT_FALSE(steps("killed").empty());
  const Result last = run("killed", 2, "--resume");
  ASSERT_EQ(last.code, 0) << last.output;
  EXPECT_TRUE(weights("killed") == weights("whole"));
}

INSTANTIATE_TEST_SUITE_P(
    AtSteps,
    KillNine,
    ::testing::Values(4, 14, 24),
    ::testing::PrintToStringParamName());

TEST_F(Checkpoints, ARankThatDiesIsStartedAgain) {
  ASSERT_EQ(run("whole", 2).code, 0);
  const std::string config = write_config("restarted");
  const Result result =
      sh(start(train(config, 2, "--max-restarts 3"), "step-20 in") +
         "kill -KILL $(pgrep -P $pid | head -1); wait $pid");
  const std::string log_text = read(log());
  EXPECT_EQ(result.code, 0) << log_text;
  EXPECT_THAT(
      log_text,
      AllOf(
          HasSubstr("was ended by signal 9"),
          HasSubstr("restart 1 of 3, from the latest checkpoint"),
          HasSubstr("step-20"),
          Not(HasSubstr("restart 2")),
          // torch's stacks of a store that is gone, and earlier output
          Not(HasSubstr("c10d")),
          Not(HasSubstr("frame #"))));
  for (const char* once : {"has all keys; these are", "slot pool"}) {
    EXPECT_EQ(log_text.find(once), log_text.rfind(once)) << log_text;
    EXPECT_THAT(log_text, HasSubstr(once));
  }
  // One curve: what the second attempt trained again is marked.
  std::map<int, std::vector<int>> attempts;
  std::ifstream rows(folder_ / "restarted" / "metrics.jsonl");
  for (std::string line; std::getline(rows, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("loss") && !row.value("overtaken", false)) {
      attempts[row["step"]].push_back(row["attempt"]);
    }
  }
  EXPECT_EQ(attempts.size(), 40u);
  for (const auto& [step, by] : attempts) {
    EXPECT_EQ(by.size(), 1u) << step;
  }
  EXPECT_THAT(attempts[1], ElementsAre(1));
  EXPECT_THAT(attempts[21], ElementsAre(2));
  EXPECT_THAT(attempts[40], ElementsAre(2));
  EXPECT_TRUE(weights("restarted") == weights("whole"));
  // A signal from outside means that the run should stop.
  const Result refused =
      run("none", 2, "--max-restarts 1 --set checkpoint.interval=0");
  EXPECT_THAT(refused.output, HasSubstr("--max-restarts requires checkpoints"));
}

// A shell ignores SIGINT in what it starts in the background.
TEST_F(Checkpoints, CtrlCAndSigtermSaveAndEnd) {
  ASSERT_EQ(run("whole", 2).code, 0);
  for (const int number : {SIGTERM, SIGINT}) {
    const std::string name = number == SIGTERM ? "SIGTERM" : "SIGINT";
    const std::string config = write_config(name);
    const Result stopped =
        sh(start(
               "env --default-signal=INT " + train(config, 2),
               "step: 5/40  loss") +
           fmt::format("kill -{} $pid; wait $pid", number));
    const std::string output = read(log());
    EXPECT_EQ(stopped.code, 128 + number) << output;
    ASSERT_EQ(steps(name).size(), 1u) << output;
    const std::int64_t step = steps(name)[0];
    EXPECT_LT(step, 40);
    EXPECT_GE(step, 5);
    EXPECT_THAT(
        output,
        AllOf(
            HasSubstr(
                fmt::format("{}: ending after step {} with a", name, step)),
            HasSubstr("once more ends it at once"),
            HasSubstr(fmt::format(
                "stopped by {} after step {} and saved a checkpoint; resume "
                "with:\n",
                name,
                step)),
            HasSubstr(fmt::format(
                "train {} --device cpu --nproc 2 --resume\n",
                config))));
    EXPECT_FALSE(fs::exists(folder_ / name / "model.safetensors"));
    const Result resumed = run(name, 2, "--resume");
    ASSERT_EQ(resumed.code, 0) << resumed.output;
    EXPECT_TRUE(weights(name) == weights("whole"));
  }
}

TEST_F(Checkpoints, CtrlCWithoutCheckpointsAndTwice) {
  const std::string config = write_config("run");
  const auto begin = [&](const std::string& more) {
    return start(
        "env --default-signal=INT " +
            train(config, 1, "--set training.steps=1000000 " + more),
        "step: 5/1000000  loss");
  };
  EXPECT_EQ(
      sh(begin("--set checkpoint.interval=0") + "kill -INT $pid; wait $pid")
          .code,
      128 + SIGINT);
  EXPECT_THAT(
      read(log()),
      AllOf(
          HasSubstr("stopped by SIGINT after step "),
          HasSubstr(
              "no checkpoint was saved because checkpoint.interval = 0")));
  // The first one cannot be heeded: the disk is too slow.
  const std::string slow = fmt::format(
      "export LD_PRELOAD='{}' SLOW_DISK_UNTIL='{}'\n",
      FLATSHARD_SLOW_DISK,
      (folder_ / "gate").string());
  const Result twice = sh(
      slow +
      begin("--set checkpoint.async=false --set checkpoint.interval=100000") +
      fmt::format(
          "kill -INT $pid\n"
          "while ! grep -q 'ending after step' '{}'; do sleep 0.01; done\n"
          "sleep 0.2; kill -INT $pid; wait $pid",
          log().string()));
  EXPECT_EQ(twice.code, 128 + SIGINT) << read(log());
  EXPECT_THAT(read(log()), Not(HasSubstr("stopped by")));
}

TEST_F(Checkpoints, Sigusr1SavesAndGoesOn) {
  const std::string config = write_config("asked");
  const Result result =
      sh(start(train(config, 2), "step: 5/40  loss") +
         "kill -USR1 $pid; wait $pid");
  EXPECT_EQ(result.code, 0) << read(log());
  EXPECT_EQ(steps("asked").size(), 3u) << read(log());
}

TEST_F(Checkpoints, AGradientThatIsNotFinite) {
  const auto spoilt = [&](const std::string& mode) {
    return run(
        mode,
        2,
        fmt::format(
            "--set debug.spoil_gradient_step=7 --set training.steps=12 "
            "--set checkpoint.interval=4 --set training.on_nonfinite={}",
            mode));
  };
  const auto named = AllOf(
      HasSubstr("the gradient of step 7 is not finite"),
      HasSubstr("parameter model."),
      HasSubstr("is nan at flat element"));
  const Result stop = spoilt("stop");
  EXPECT_EQ(stop.code, 1) << stop.output;
  EXPECT_THAT(stop.output, named);
  EXPECT_EQ(stop.errors().size(), 1u) << stop.output;
  EXPECT_THAT(steps("stop"), ElementsAre(4));
  // Found late, but still named, and not saved.
  const Result late =
      run("late",
          2,
          "--set debug.spoil_gradient_step=3 --set training.steps=12 "
          "--set checkpoint.interval=4 --set metrics.log_freq=10");
  EXPECT_EQ(late.code, 1) << late.output;
  EXPECT_THAT(
      late.output,
      HasSubstr("the gradient of step 3 is not finite, as was seen in step 4"));
  EXPECT_EQ(late.errors().size(), 1u) << late.output;
  EXPECT_THAT(steps("late"), ElementsAre());

  const Result skip = spoilt("skip");
  EXPECT_EQ(skip.code, 0) << skip.output;
  EXPECT_THAT(
      skip.output,
      AllOf(named, HasSubstr("the weights stay as they were")));
  EXPECT_EQ(losses("skip").count(7), 0u);
  EXPECT_EQ(losses("skip").count(8), 1u);

  const Result rewind = spoilt("rewind");
  EXPECT_EQ(rewind.code, 0) << rewind.output;
  EXPECT_THAT(
      rewind.output,
      AllOf(named, HasSubstr("resuming from the checkpoint of step 4")));
  EXPECT_EQ(losses("rewind").size(), 12u);
  EXPECT_THAT(steps("rewind"), ElementsAre(4, 8, 12));
}

TEST_F(Checkpoints, FolderMayBeRelativeOrAbsolute) {
  const std::string common = "--set training.steps=2 --set checkpoint.folder=";
  const Result relative = run("run", 2, common + "saved/here");
  ASSERT_EQ(relative.code, 0) << relative.output;
  EXPECT_THAT(
      list_checkpoints(folder_ / "run" / "saved" / "here"),
      ElementsAre(2));
  const fs::path elsewhere = folder_ / "elsewhere";
  const Result absolute = run("other", 2, common + elsewhere.string());
  ASSERT_EQ(absolute.code, 0) << absolute.output;
  EXPECT_THAT(list_checkpoints(elsewhere), ElementsAre(2));
  for (const char* name : {"run", "other"}) {
    EXPECT_FALSE(fs::exists(folder_ / name / "checkpoints"));
  }
}

TEST_F(Checkpoints, WithoutAsyncTheStepEndsWithTheSave) {
  const Result result =
      run("run",
          2,
          "--set training.steps=8 --set checkpoint.interval=1 "
          "--set checkpoint.async=false");
  ASSERT_EQ(result.code, 0) << result.output;
  // An asynchronous save is reported after the next step at the earliest.
  std::size_t at = 0;
  for (int step = 1; step <= 8; ++step) {
    for (const std::string& line :
         {fmt::format("step: {}/8  loss", step),
          fmt::format("checkpoints/step-{} in", step)}) {
      const std::size_t found = result.output.find(line);
      ASSERT_NE(found, std::string::npos) << line << "\n" << result.output;
      EXPECT_GT(found, at) << line << "\n" << result.output;
      at = found;
    }
  }
}

TEST_F(Checkpoints, AFolderThatIsReadOnlyEndsNoStep) {
  fs::path folder = folder_ / "read_only";
  fs::create_directories(folder);
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  if (::geteuid() == 0) {
    folder = "/proc/self/task";  // root may not write there either
  }
  const Result result =
      run("run",
          2,
          fmt::format(
              "--set training.steps=8 --set checkpoint.interval=3 "
              "--set checkpoint.folder='{}'",
              folder.string()));
  for (const int step : {3, 6, 8}) {
    EXPECT_THAT(
        result.output,
        HasSubstr(fmt::format(
            "warning: the checkpoint of step {} failed, the run continues "
            "and tries again at the next one: io error: rank",
            step)));
  }
  EXPECT_THAT(
      result.output,
      HasSubstr(fmt::format("cannot make {}/step-3", folder.string())));
  EXPECT_EQ(losses("run").size(), 8u) << result.output;
  // Only the failure of the last checkpoint fails the run.
  EXPECT_EQ(result.code, 1) << result.output;
  ASSERT_EQ(result.errors().size(), 1u) << result.output;
  EXPECT_THAT(
      result.errors()[0],
      AllOf(HasSubstr("[checkpoint.folder]"), HasSubstr("/step-8")));
}

TEST_F(Checkpoints, ASlowDiskHoldsUpOnlyTheCheckpointsAfterNext) {
  const std::string often = "--set checkpoint.interval=10";
  ASSERT_EQ(run("whole", 2, often).code, 0);
  const std::string gate = (folder_ / "gate").string();
  const Result slow = sh(fmt::format(
      "export LD_PRELOAD='{0}' SLOW_DISK_UNTIL='{1}'\n{2}"
      "touch '{1}'; wait $pid",
      FLATSHARD_SLOW_DISK,
      gate,
      start(train(write_config("slow"), 2, often), "step 30 waits")));
  const std::string output = read(log());
  ASSERT_EQ(slow.code, 0) << output;
  const auto at = [&](const std::string& text) {
    EXPECT_THAT(output, HasSubstr(text));
    return output.find(text);
  };
  // Two buffers: the third save is the first one that has to wait.
  const auto first = at("checkpoints/step-10 in");
  EXPECT_LT(at("step: 29/40  loss"), first);
  EXPECT_LT(at("the checkpoint of step 30 waits"), first);
  EXPECT_THAT(output, Not(HasSubstr("the checkpoint of step 20 waits")));
  EXPECT_THAT(steps("slow"), ElementsAre(10, 20, 30, 40));
  EXPECT_EQ(
      sh(fmt::format(
             "\"$PROGRAM\" checkpoint verify '{}'",
             (folder_ / "slow" / "checkpoints").string()))
          .code,
      0);
  EXPECT_TRUE(weights("slow") == weights("whole"));
}

TEST_F(Checkpoints, ListInspectVerifyPrune) {
  ASSERT_EQ(
      run("run", 2, "--set training.steps=6 --set checkpoint.interval=2").code,
      0);
  const std::string folder = (folder_ / "run" / "checkpoints").string();
  const auto checkpoint = [&](const std::string& arguments) {
    return sh(fmt::format("\"$PROGRAM\" checkpoint {}", arguments));
  };
  const Result listed = checkpoint(fmt::format("list '{}'", folder));
  EXPECT_EQ(listed.code, 0) << listed.output;
  EXPECT_THAT(
      listed.output,
      AllOf(HasSubstr("step 2 "), HasSubstr("step 6 "), HasSubstr("latest")));
  // The run's folder means its checkpoints.
  const std::string whole_run = (folder_ / "run").string();
  const Result of_run = checkpoint(fmt::format("list --run '{}'", whole_run));
  EXPECT_EQ(of_run.code, 0);
  EXPECT_EQ(of_run.output, listed.output);
  EXPECT_EQ(checkpoint(fmt::format("verify '{}'", whole_run)).code, 0);
  const Result inspected =
      checkpoint(fmt::format("inspect '{}' --tensors --config", folder));
  EXPECT_EQ(inspected.code, 0) << inspected.output;
  EXPECT_THAT(
      inspected.output,
      AllOf(
          HasSubstr("step      6"),
          HasSubstr("{dp: 2}"),
          HasSubstr("exp_avg of lm_head.weight  F32 [257, 32]"),
          HasSubstr("samples_consumed"),
          HasSubstr("seq_len = 33")));
  const Result pruned =
      checkpoint(fmt::format("prune '{}' --keep 1", whole_run));
  EXPECT_EQ(pruned.code, 0) << pruned.output;
  EXPECT_THAT(pruned.output, HasSubstr("removed 2 checkpoints: step 2, 4"));
  EXPECT_THAT(steps("run"), ElementsAre(6));

  EXPECT_EQ(checkpoint(fmt::format("verify '{}'", folder)).code, 0);
  const fs::path shard =
      step_folder(folder, 6) / "shard-00002-of-00002.safetensors";
  {
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put('\x55');
  }
  const Result damaged = checkpoint(fmt::format("verify '{}'", folder));
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(
      damaged.output,
      AllOf(HasSubstr(shard.string()), HasSubstr("damaged")));
  for (const char* command : {"list", "inspect", "verify", "prune --keep 1"}) {
    const Result none = checkpoint(fmt::format("{} /nowhere", command));
    EXPECT_EQ(none.code, 1) << command;
    EXPECT_THAT(none.output, HasSubstr("/nowhere")) << command;
  }
}

TEST_F(Checkpoints, ExportAndStartFromIt) {
  ASSERT_EQ(
      run("run",
          2,
          "--set training.steps=4 --set checkpoint.export_hf_at_end=true")
          .code,
      0);
  const fs::path hf = folder_ / "run" / "hf";
  EXPECT_TRUE(fs::exists(hf / "config.json"));
  // The same weights as the run's own file.
  EXPECT_TRUE(read(hf / "model.safetensors") == weights("run"));
  const auto exported = [&](const std::string& more) {
    return sh(fmt::format(
        "\"$PROGRAM\" export --run '{}' --to '{}' {}",
        (folder_ / "run").string(),
        (folder_ / "half").string(),
        more));
  };
  EXPECT_THAT(
      exported("--step 3").output,
      HasSubstr("expected a checkpoint of step 3"));
  const Result half = exported("--step 4 --dtype bfloat16");
  EXPECT_EQ(half.code, 0) << half.output;
  EXPECT_THAT(half.output, HasSubstr("bfloat16"));
  EXPECT_THAT(exported("").output, HasSubstr("--to: expected a folder"));
  EXPECT_THAT(
      sh(fmt::format(
             "\"$PROGRAM\" export --run '{}' --to '{}' --fp8",
             (folder_ / "run").string(),
             (folder_ / "fp8").string()))
          .output,
      HasSubstr("14 in FP8, the rest bfloat16"));

  // Without a single update the weights are the initial ones.
  const Result started =
      run("started",
          3,
          fmt::format(
              "--set model.init_from='{}' --set training.steps=1 "
              "--set optimizer.lr=0",
              hf.string()));
  ASSERT_EQ(started.code, 0) << started.output;
  EXPECT_TRUE(weights("started") == weights("run"));
  const Result other =
      run("other",
          2,
          fmt::format(
              "--set model.init_from='{}' --set model.layers=3",
              hf.string()));
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(
      other.output,
      AllOf(HasSubstr("model.init_from"), HasSubstr("model.layers.2.")));
}

}  // namespace
}  // namespace flatshard::testing
