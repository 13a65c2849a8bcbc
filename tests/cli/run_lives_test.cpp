// A run outlives signals, readers of its output, moves, and other data.
#include "tests/cli/bad_input.h"

#include "flatshard/format/checkpoint_folder.h"

#include <gmock/gmock.h>

#include <csignal>
#include <tuple>
#include <utility>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Two datasets with the same number of tokens, in one folder for all tests.
class RunLives : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TempFolder;
    prepare_corpus(*shared_);
    fs::copy(
        *shared_ / "corpus",
        *shared_ / "other",
        fs::copy_options::recursive);
    const fs::path shard = *shared_ / "other/train-00000.bin";
    const std::string tokens = read(shard);
    std::string turned;
    for (std::size_t i = tokens.size(); i >= 2; i -= 2) {
      turned += tokens.substr(i - 2, 2);
    }
    shared_->write("other/train-00000.bin", turned);
  }
  static void TearDownTestSuite() { delete shared_; }

  /// The paths in the config are relative to the working folder, `folder_`.
  RunLives() {
    folder_.write(
        "run.toml",
        R"([run]
output_dir = "run"
[model]
dim = 16
layers = 1
heads = 2
ffn_dim = 32
vocab_size = 257
[data]
train = "corpus"
[training]
steps = 6
seq_len = 16
local_batch_size = 2
global_batch_size = 4
[optimizer]
lr = 1e-2
[precision]
compute = "float32"
[checkpoint]
interval = 2
[metrics]
log_freq = 1
)");
    for (const char* corpus : {"corpus", "other"}) {
      fs::copy(
          *shared_ / corpus,
          folder_ / corpus,
          fs::copy_options::recursive);
    }
  }

  Result in_folder(const std::string& shell) const {
    return sh(fmt::format("cd '{}'\n{}", folder_.path().string(), shell));
  }

  static std::string train(const std::string& more, int ranks = 1) {
    return fmt::format(
        "\"$PROGRAM\" train run.toml --device cpu --nproc {} {}",
        ranks,
        more);
  }

  /// Returns lines of a shell that start `command` as $pid and wait for its
  /// line of `step`. The command has a separate process group and writes its
  /// output to the file `out`.
  static std::string start(const std::string& command, int step) {
    return fmt::format(
        ": > out\nsetsid {} > out 2>&1 & pid=$!\n"
        "while kill -0 $pid 2>/dev/null && ! grep -q 'step: {}/' out; do "
        "sleep 0.01; done\n",
        command,
        step);
  }

  static inline TempFolder* shared_ = nullptr;
  TempFolder folder_;
};

TEST_F(RunLives, NohupGoesToTheEnd) {
  const Result result = in_folder(
      start("nohup " + train("--set training.steps=60", 2), 2) +
      "kill -HUP -$pid; kill -HUP $pid; kill -HUP -$pid\n"
      "wait $pid; echo $?; cat out");
  EXPECT_THAT(result.output, StartsWith("0\n"));
  EXPECT_THAT(result.output, HasSubstr("step: 60/60"));
}

// A terminal that closes may send several.
TEST_F(RunLives, HangingUpSavesAndEnds) {
  const Result result = in_folder(
      start(
          train(
              "--set training.steps=100000 --set checkpoint.interval=1000"
              " --set lr_scheduler.name=constant",
              2),
          2) +
      "kill -HUP -$pid; kill -HUP $pid; kill -HUP -$pid\n"
      "wait $pid; echo $?; cat out");
  EXPECT_THAT(result.output, StartsWith("129\n"));
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("SIGHUP: ending after step"),
          HasSubstr("stopped by SIGHUP after step")));
  EXPECT_EQ(list_checkpoints(folder_ / "run/checkpoints").size(), 1U);
}

TEST_F(RunLives, AReaderThatGoesAwayEndsNothing) {
  for (const int ranks : {1, 2}) {
    const Result result = in_folder(
        "rm -rf run\n{ " + train("2>&1", ranks) +
        "; echo $? > code; } | head -1\ncat code");
    EXPECT_THAT(result.output, StartsWith("config: ")) << result.output;
    EXPECT_THAT(result.output, ::testing::EndsWith("\n0\n")) << result.output;
    const std::string log = read(folder_ / "run/output.log");
    EXPECT_THAT(log, HasSubstr("step: 6/6"));
    const std::string notice = "the run continues, and its output is in this";
    EXPECT_NE(log.find(notice), log.npos) << log;
    EXPECT_EQ(log.find(notice), log.rfind(notice)) << log;
  }
}

TEST_F(RunLives, OtherCommandsEndWithTheirReader) {
  EXPECT_EQ(
      in_folder("{ \"$PROGRAM\" train --help-config; echo $? > code; } | head "
                "-1 >/dev/null; cat code")
          .output,
      "141\n");
}

TEST_F(RunLives, OtherDataAreRefusedByName) {
  ASSERT_EQ(in_folder(train("--set training.steps=4")).code, 0);
  const auto files = snapshot(folder_ / "run");
  const std::string resume = "--resume --set validation.freq=2";
  const Result other = in_folder(train(resume + " --set data.train=other", 2));
  EXPECT_EQ(other.code, 1);
  EXPECT_EQ(other.errors().size(), 1U) << other.output;
  EXPECT_THAT(
      other.output,
      AllOf(
          HasSubstr("was trained on another dataset"),
          HasSubstr("(then corpus)"),
          HasSubstr("checkpoint.exclude = \"loader\"")));
  EXPECT_EQ(snapshot(folder_ / "run"), files);
  // Prepared again in its place.
  fs::rename(folder_ / "corpus", folder_ / "old");
  fs::rename(folder_ / "other", folder_ / "corpus");
  EXPECT_THAT(
      in_folder(train(resume)).output,
      HasSubstr("was trained on another dataset"));
  // The same tokens elsewhere are the same dataset.
  const Result moved = in_folder(train("--resume --set data.train=old"));
  EXPECT_EQ(moved.code, 0) << moved.output;
  const Result anew = in_folder(
      train("--resume --set training.steps=8 --set checkpoint.exclude=loader"));
  EXPECT_EQ(anew.code, 0) << anew.output;
}

TEST_F(RunLives, OtherValidationDataAreAWarning) {
  const std::string validation = "--set validation.freq=2 ";
  ASSERT_EQ(in_folder(train(validation + "--set training.steps=4")).code, 0);
  const fs::path split = folder_ / "other/validation-00000.bin";
  std::string tokens = read(split);
  std::swap(tokens[0], tokens[2]);
  folder_.write("other/validation-00000.bin", tokens);
  const Result result =
      in_folder(train(validation + "--resume --set data.validation=other"));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      HasSubstr("warning: data.validation: the validation data differ from"));
}

TEST_F(RunLives, ARunIsCompleteWithoutWhatItWasMadeOf) {
  const Result trained = in_folder(
      train("") +
      " && \"$PROGRAM\" export --run run --to hf && "
      "\"$PROGRAM\" train run.toml --device cpu --set run.output_dir=run2 "
      "--set model.init_from=hf --set model.hf_config= "
      "--set model.dim=16");
  ASSERT_EQ(trained.code, 0) << trained.output;
  for (const char* run : {"run", "run2"}) {
    const TempFolder elsewhere;
    fs::copy(folder_ / run, elsewhere / "moved", fs::copy_options::recursive);
    for (const char* from : {"moved", "moved/checkpoints/step-4"}) {
      const Result used = sh(fmt::format(
          "cd '{0}' && \"$PROGRAM\" generate --run {1} --prompt li "
          "--max-new-tokens 3 --device cpu && "
          "\"$PROGRAM\" export --run {1} --to hf-$$ && ls hf-*",
          elsewhere.path().string(),
          from));
      EXPECT_EQ(used.code, 0) << used.output;
      EXPECT_THAT(
          used.output,
          AllOf(
              HasSubstr("li"),
              HasSubstr("tokenizer.json"),
              Not(HasSubstr("warning"))));
    }
  }
}

// A file's time proves nothing: a copy has the time of the copying.
TEST_F(RunLives, GenerateTakesTheLastStepWhateverTheTimes) {
  const std::string generate =
      "\"$PROGRAM\" generate --run run --prompt li --max-new-tokens 1 "
      "--device cpu 2>&1 | grep -c 'weights of'";
  ASSERT_EQ(in_folder(train("")).code, 0);
  EXPECT_EQ(
      in_folder("find run/checkpoints -exec touch {} +; " + generate).output,
      "0\n");  // the end's numbers
  // Resumed and interrupted: the weights of the old end still exist.
  const Result longer = in_folder(
      start(
          train("--resume --set training.steps=100000 "
                "--set checkpoint.keep_latest_k=2"),
          20) +
      "kill -TERM $pid; wait $pid; touch run/model.safetensors; " + generate);
  EXPECT_EQ(longer.output, "1\n");
  // A new run in the folder has no results of the earlier run.
  const Result anew = in_folder(
      start(
          train("--set training.steps=100000 --set checkpoint.interval=0 "
                "--set lr_scheduler.name=constant"),
          2) +
      "kill -TERM $pid; wait $pid; ls run; \"$PROGRAM\" generate --run run");
  EXPECT_THAT(
      anew.output,
      AllOf(
          Not(HasSubstr("model.safetensors\n")),
          HasSubstr("has neither model.safetensors")));
}

TEST_F(RunLives, ACopyThatWasCutOffIsNotResumedFrom) {
  ASSERT_EQ(in_folder(train("--set training.steps=4")).code, 0);
  const fs::path shard =
      folder_ / "run/checkpoints/step-4" / "shard-00001-of-00001.safetensors";
  ASSERT_TRUE(fs::exists(shard));
  fs::resize_file(shard, 100);
  const Result result = in_folder(train("--resume"));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("step-4 is incomplete, so the run resumes from the "
                    "checkpoint before it"),
          HasSubstr("step: 3/6")));
}

TEST_F(RunLives, FilesFollowTheUmask) {
  for (const auto& [mask, file, folder] :
       {std::tuple{"002", "664", "775"}, std::tuple{"077", "600", "700"}}) {
    const Result result = in_folder(fmt::format(
        "umask {}; rm -rf run hf corpus2\n{} >/dev/null 2>&1 && "
        "\"$PROGRAM\" export --run run --to hf >/dev/null && "
        "\"$PROGRAM\" data prepare --input run.toml --output corpus2 "
        ">/dev/null\n"
        "find run hf corpus2 -type f ! -perm {} -ls\n"
        "find run hf corpus2 -type d ! -perm {} -ls",
        mask,
        train("", 2),
        file,
        folder));
    EXPECT_EQ(result.output, "") << mask;
  }
}

TEST_F(RunLives, ATildeIsTheHomeFolderInEveryOption) {
  const Result result = in_folder(
      "export HOME=\"$PWD/home\"; mkdir home; mv corpus home\n" +
      train("--set 'run.output_dir=~/run' --set 'data.train=~/corpus' "
            ">/dev/null 2>&1") +
      " && \"$PROGRAM\" export --run='~/run' --to='~/hf' && "
      "\"$PROGRAM\" checkpoint list '~/run' && "
      "\"$PROGRAM\" data prepare --input '~/run/config.toml' --output "
      "'~/made' >/dev/null; ls; ls home");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      ::testing::EndsWith("home\nother\nrun.toml\ncorpus\nhf\nmade\nrun\n"));
}

TEST_F(RunLives, ASlurmBatchScriptIsSeenAtOnce) {
  const std::string slurm =
      "export SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_LOCALID=0 "
      "SLURM_JOB_NODELIST=here\n";
  const Result without =
      in_folder(slurm + "\"$PROGRAM\" train run.toml --device cpu");
  EXPECT_EQ(without.code, 2) << without.output;
  EXPECT_THAT(without.output, HasSubstr("put srun before flatshard"));
  const Result with = in_folder(slurm + train("", 2));
  EXPECT_EQ(with.code, 0) << with.output;
  EXPECT_THAT(with.output, HasSubstr("2 ranks of CPU"));
}

}  // namespace
}  // namespace flatshard::testing
