// Runs the program itself: options, exit codes, and two ranks end to end.
#include "tests/support/program.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"

#include <fmt/format.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <map>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Result = testing::ProgramResult;

Result run(const std::string& arguments) {
  return testing::run_program(arguments);
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The CPU, two ranks on it; on a machine with GPUs these as well.
TEST(Doctor, ItTriesThisMachine) {
  const Result result = run("doctor");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("CPU, a step: bfloat16 works"),
          HasSubstr("CPU, a step: FP8 weights works"),
          HasSubstr("CPU, a step: experts works"),
          ::testing::ContainsRegex("2 ranks over [a-zA-Z]+: experts works"),
          Not(HasSubstr("FAILED"))));
}

TEST(Doctor, ItEndsWithOneAndTheReason) {
  if (std::filesystem::exists("/dev/nvidia1")) {
    GTEST_SKIP() << "two GPUs meet over NCCL, which needs no such interface";
  }
  ::setenv("GLOO_SOCKET_IFNAME", "no_such_0", 1);
  const Result result = run("doctor");
  ::unsetenv("GLOO_SOCKET_IFNAME");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("CPU, a step: bfloat16 works"),
          HasSubstr("no_such_0"),
          HasSubstr("does not work: 2 ranks exited with 1")));
}

TEST(Doctor, InfoPrintsTheBuildAndTheMachine) {
  const Result result = run("info");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("flatshard          "),
          HasSubstr("torch              "),
          HasSubstr("CUDA code for      "),
          HasSubstr("threads")));
}

class Program : public ::testing::Test {
 protected:
  void write_config(const std::string& more = {}) const {
    std::string text;
    for (int i = 0; i < 400; ++i) {
      text += fmt::format("line {} of a text\n", i % 10);
    }
    folder_.write("texts/a.txt", text);
    const Result prepared = run(fmt::format(
        "data prepare --force --input '{}' --output '{}'",
        (folder_ / "texts").string(),
        (folder_ / "corpus").string()));
    ASSERT_EQ(prepared.code, 0) << prepared.output;
    folder_.write(
        "run.toml",
        fmt::format(
            R"(
[run]
output_dir = "{}"
[model]
dim = 32
layers = 2
heads = 4
ffn_dim = 64
vocab_size = 257
[data]
train = "{}"
[training]
steps = 12
seq_len = 32
local_batch_size = 2
global_batch_size = 8
[optimizer]
lr = 1e-2
[precision]
compute = "float32"
[validation]
freq = 6
sequences = 3
[metrics]
log_freq = 4
{}
)",
            (folder_ / "run").string(),
            (folder_ / "corpus").string(),
            more));
  }

  std::string config() const {
    return "'" + (folder_ / "run.toml").string() + "'";
  }

  TempFolder folder_;
};

TEST_F(Program, HelpAndVersion) {
  const Result help = run("--help");
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(
      help.output,
      AllOf(HasSubstr("train"), HasSubstr("generate"), HasSubstr("data")));
  const Result version = run("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.output, ::testing::StartsWith("flatshard "));
  EXPECT_THAT(run("train --help").output, HasSubstr("--nproc"));
}

TEST_F(Program, HelpConfigNamesEveryKey) {
  const Result help = run("train --help-config");
  EXPECT_EQ(help.code, 0);
  for (const char* key :
       {"output_dir",
        "seed",
        "hf_config",
        "kv_heads",
        "seq_len",
        "max_norm",
        "weight_decay",
        "warmup_steps",
        "strategy",
        "prefetch",
        "main_grads",
        "mode",
        "freq",
        "log_freq",
        "min_lr_factor",
        "global_batch_size"}) {
    EXPECT_THAT(help.output, HasSubstr(key));
  }
}

TEST_F(Program, WrongOptionsFailByName) {
  const Result nothing = run("");
  EXPECT_EQ(nothing.code, 2);
  EXPECT_THAT(
      nothing.output,
      AllOf(
          HasSubstr("Usage: flatshard "),
          HasSubstr("train "),
          HasSubstr("generate "),
          Not(HasSubstr("error"))));
  const Result group = run("data");
  EXPECT_EQ(group.code, 2);
  EXPECT_THAT(
      group.output,
      AllOf(
          HasSubstr("Usage: flatshard data "),
          HasSubstr("prepare "),
          Not(HasSubstr("evaluate "))));
  for (const auto& [words, says] : std::map<std::string, std::string>{
           {"tarin x.toml", "no subcommand 'tarin'; did you mean 'train'?"},
           {"checkpoint lst /x",
            "flatshard checkpoint has no subcommand 'lst'; did you mean "
            "'list'?"}}) {
    const Result typo = run(words);
    EXPECT_EQ(typo.code, 2);
    EXPECT_THAT(typo.output, HasSubstr(says));
  }
  // One line each.
  for (const auto& [words, says] : std::map<std::string, std::string>{
           {"train --nothing x.toml",
            "error: flatshard train has no option '--nothing'; expected one "
            "of --help, --nproc, "},
           {"train --nprocs=2 x.toml",
            "error: flatshard train has no option '--nprocs'; did you mean "
            "'--nproc'?\n"},
           {"train x.toml y.toml",
            "error: flatshard train has no further argument 'y.toml'\n"},
           {"train --nproc 0 x.toml", "error: --nproc: "},
           {"train --max-restarts 2 x.toml",
            "error: --max-restarts requires --nproc, "},
           {"train --nproc x x.toml", "error: "},
           {"generate", "error: --run is required\n"},
           {"export --run x --to y --dtype int8", "error: --dtype: "}}) {
    const Result wrong = run(words);
    EXPECT_EQ(wrong.code, 2) << words;
    EXPECT_THAT(wrong.output, ::testing::StartsWith(says));
    EXPECT_EQ(std::count(wrong.output.begin(), wrong.output.end(), '\n'), 1)
        << wrong.output;
  }
  const Result no_config = run("train");
  EXPECT_EQ(no_config.code, 2);
  EXPECT_THAT(no_config.output, HasSubstr("flatshard train CONFIG.toml"));
  const Result missing = run("train /none.toml");
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.output, HasSubstr("/none.toml"));
  const Result generate = run("generate --run /none");
  EXPECT_EQ(generate.code, 1);
  EXPECT_THAT(generate.output, HasSubstr("--run"));
}

TEST_F(Program, ShellsCompleteWhatThereIs) {
  EXPECT_EQ(run("completion fish").code, 2);
  EXPECT_THAT(run("completion zsh").output, HasSubstr("bashcompinit"));
  const auto complete = [&](const std::string& words, int at) {
    const auto script = folder_.write(
        "complete.sh",
        fmt::format(
            "source <('{}' completion bash)\n"
            "compopt() {{ :; }}\n"
            "COMP_WORDS=({}) COMP_CWORD={}\n"
            "_flatshard\n"
            "echo \"${{COMPREPLY[*]}}\"\n",
            FLATSHARD_PROGRAM,
            words,
            at));
    std::FILE* pipe = ::popen(("bash " + script.string()).c_str(), "r");
    std::string output;
    std::array<char, 4096> buffer{};
    while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
      output.append(buffer.data(), n);
    }
    ::pclose(pipe);
    return output;
  };
  EXPECT_EQ(complete("flatshard tr", 1), "train\n");
  EXPECT_EQ(complete("flatshard checkpoint l", 2), "list\n");
  EXPECT_EQ(complete("flatshard train x.toml --res", 3), "--resume\n");
  EXPECT_EQ(complete("flatshard pl", 1), "plan\n");
  EXPECT_EQ(complete("flatshard plan x.toml --sw", 3), "--sweep\n");
  EXPECT_EQ(
      complete("flatshard train --set training.se", 3),
      "training.seq_len=\n");
}

TEST_F(Program, ConfigPrintsAFileToStartFrom) {
  const Result printed = run("config llama3_1b --set training.steps=3");
  EXPECT_EQ(printed.code, 0);
  EXPECT_THAT(
      printed.output,
      AllOf(
          HasSubstr("\npreset = \"llama3_1b\"\n"),
          HasSubstr("\nsteps = 3\n"),
          HasSubstr("\n# seed = 0\n")));
  const Result unknown = run("config llama3_1bb");
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.output, HasSubstr("llama3_1b"));
}

TEST_F(Program, TextsToContinueComeFromAFile) {
  const std::string none = (folder_ / "none.txt").string();
  const Result missing = run("generate --run x --prompts " + none);
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.output, HasSubstr("--prompts: cannot read " + none));
  const auto empty = folder_.write("empty.txt", "\n\n");
  const Result nothing = run("generate --run x --prompts " + empty.string());
  EXPECT_EQ(nothing.code, 1);
  EXPECT_THAT(nothing.output, HasSubstr("contains no text"));
  EXPECT_EQ(run("generate --run x --prompt a --prompts b").code, 2);
}

TEST_F(Program, WrongKeysNameTheNearestOne) {
  write_config("[optimiser]\nlr = 1\n");
  const Result section = run("train " + config());
  EXPECT_EQ(section.code, 1);
  EXPECT_THAT(
      section.output,
      AllOf(HasSubstr("optimiser"), HasSubstr("optimizer")));
  write_config();
  const Result key = run("train " + config() + " --set training.step=3");
  EXPECT_EQ(key.code, 1);
  EXPECT_THAT(key.output, HasSubstr("did you mean 'steps'?"));
  // Said once, before ranks start.
  const Result batch = run("train " + config() + " --nproc 3 --device cpu");
  EXPECT_EQ(batch.code, 1);
  EXPECT_THAT(
      batch.output,
      AllOf(
          HasSubstr("training.global_batch_size = 8"),
          Not(HasSubstr("rank 1"))));
}

TEST_F(Program, TwoRanksTrainAndTheirRunGenerates) {
  write_config();
  const Result two = run("train " + config() + " --nproc 2 --device cpu");
  ASSERT_EQ(two.code, 0) << two.output;
  EXPECT_THAT(two.output, HasSubstr("2 ranks of CPU"));
  EXPECT_THAT(two.output, HasSubstr("2 microbatches per step"));
  EXPECT_THAT(two.output, HasSubstr("step: 12/12  loss: "));
  EXPECT_THAT(two.output, HasSubstr("step: 12  validation_loss: "));
  EXPECT_THAT(two.output, HasSubstr("saved "));
  const std::string metrics = read(folder_ / "run" / "metrics.jsonl");
  EXPECT_THAT(metrics, HasSubstr("\"step\":12"));
  // Only rank 0 writes: the start, steps 1, 4, 8 and 12, validations 6 and 12,
  // the end.
  EXPECT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 8);

  const Result generated = run(fmt::format(
      "generate --run '{}' --prompt 'line 3' --max-new-tokens 20 "
      "--temperature 0 --device cpu",
      (folder_ / "run").string()));
  EXPECT_EQ(generated.code, 0);
  // After the line of standard error about memory.
  EXPECT_THAT(generated.output, HasSubstr("\nline 3 "));
  const auto prompts = folder_.write("prompts.txt", "line 3\nline 4\n");
  const Result several = run(fmt::format(
      "generate --run '{}' --prompts '{}' --max-new-tokens 20 --temperature 0 "
      "--device cpu",
      (folder_ / "run").string(),
      prompts.string()));
  EXPECT_EQ(several.code, 0);
  EXPECT_THAT(
      several.output,
      AllOf(
          HasSubstr("--- prompt 1\nline 3 "),
          HasSubstr("\n--- prompt 2\nline 4 ")));
  EXPECT_THAT(generated.output, Not(HasSubstr("--- prompt")));

  // Once, by one rank; and each can be typed.
  const std::string ran = (folder_ / "run").string();
  for (const std::string& command :
       {" report --run " + ran,
        " generate --run " + ran + " --prompt \"Once upon a time\"",
        " evaluate --run " + ran + " --data " + (folder_ / "corpus").string() +
            " --packing stream"}) {
    const std::size_t at = two.output.find(command + "\n");
    EXPECT_NE(at, std::string::npos) << command << two.output;
    EXPECT_EQ(at, two.output.rfind(command + "\n"));
    EXPECT_EQ(run(command).code, 0) << command;
  }
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/report.html"));
  EXPECT_FALSE(std::filesystem::exists("report.html"));
  const Result elsewhere = run(fmt::format(
      "report --run {} --to '{}'",
      ran,
      (folder_ / "page.html").string()));
  EXPECT_EQ(elsewhere.code, 0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "page.html"));

  // 400 lines of 17 bytes and their ends: 90 % of them in samples of 32.
  EXPECT_THAT(
      two.output,
      ::testing::ContainsRegex("corpus: one epoch has [0-9]+ samples, [0-9.]+ "
                               "steps; the run has [0-9.]+ epochs"));
  // Derived values were not set.
  const std::string set = two.output.substr(0, two.output.find("model: "));
  EXPECT_THAT(set, HasSubstr("global_batch_size = 8"));
  EXPECT_THAT(set, Not(HasSubstr("data_parallel_shard_degree")));

  // The same steps on one rank: the same global batches, the same losses.
  const Result one = run(fmt::format(
      "train {} --device cpu --set 'run.output_dir={}'",
      config(),
      (folder_ / "one").string()));
  ASSERT_EQ(one.code, 0) << one.output;
  const auto last_loss = [](const std::string& text) {
    const auto at = text.find("step: 12/12  loss: ");
    return std::stod(text.substr(at + 19));
  };
  const double tolerance = testing::sum_tolerance(
      {.addends = 8 * 32,  // tokens of a step
       .in_a_row = testing::sums_of_steps(/*layers=*/2, 12)});
  EXPECT_NEAR(last_loss(two.output), last_loss(one.output), tolerance);
  // Three sequences, of which a rank has two and the other one.
  const auto last_validation = [](const std::string& text) {
    constexpr std::string_view kKey = "step: 12  validation_loss: ";
    return std::stod(text.substr(text.find(kKey) + kKey.size()));
  };
  EXPECT_NEAR(
      last_validation(two.output),
      last_validation(one.output),
      tolerance);
  const Result outer =
      run("train " + config() +
          " --nproc 2 --device cpu --set parallelism.strategy=hfsdp "
          "--set parallelism.data_parallel_replicate_degree=2");
  ASSERT_EQ(outer.code, 0) << outer.output;
  EXPECT_THAT(outer.output, HasSubstr("strategy hfsdp"));
  EXPECT_NEAR(last_loss(outer.output), last_loss(one.output), tolerance);
}

TEST_F(Program, RanksThatCopyTrainTheSame) {
  write_config();
  const std::string config = (folder_ / "run.toml").string();
  std::string expected;
  for (const char* set : {"auto", "none", "forward", "all"}) {
    const Result result = run(fmt::format(
        "train '{}' --nproc 2 --device cpu "
        "--set parallelism.copy_engines={}",
        config,
        set));
    ASSERT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(
        result.output.find("copied gradients") != std::string::npos,
        std::string(set) == "all")
        << result.output;
    const std::string taken = std::string(set) == "auto" ? "none" : set;
    EXPECT_THAT(result.output, HasSubstr("copy engines " + taken + ";"));
    const std::string weights = read(folder_ / "run" / "model.safetensors");
    ASSERT_FALSE(weights.empty());
    expected = expected.empty() ? weights : expected;
    EXPECT_TRUE(weights == expected) << set;
  }
}

TEST_F(Program, AMemoryBudgetKeepsUnitsGathered) {
  write_config();
  const auto train = [&](const char* gib) {
    return run(fmt::format(
        "train {} --nproc 2 --device cpu --set model.layers=6 "
        "--set parallelism.memory_budget={}",
        config(),
        gib));
  };
  const auto weights = [&] {
    return read(folder_ / "run" / "model.safetensors");
  };
  const Result plain = train("0");
  ASSERT_EQ(plain.code, 0) << plain.output;
  EXPECT_THAT(plain.output, Not(HasSubstr("stay unsharded")));
  const std::string expected = weights();
  ASSERT_FALSE(expected.empty());
  // The embedding and six blocks. The backward starts with the head.
  const Result kept = train("1");
  ASSERT_EQ(kept.code, 0) << kept.output;
  EXPECT_THAT(kept.output, HasSubstr("7 of 9 units stay unsharded"));
  EXPECT_TRUE(weights() == expected);

  const Result little = train("0.00001");
  EXPECT_EQ(little.code, 1);
  EXPECT_THAT(
      little.output,
      HasSubstr("parallelism.memory_budget: expected at least 0.00"));
}

TEST_F(Program, PostForwardRanksChangeNoBit) {
  write_config();
  std::string expected;
  for (const int ranks : {0, 2}) {
    const Result result = run(fmt::format(
        "train {} --nproc 4 --device cpu --set model.layers=4 "
        "--set parallelism.post_forward_ranks={}",
        config(),
        ranks));
    ASSERT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(
        result.output.find("are shards from forward to backward") !=
            std::string::npos,
        ranks == 2)
        << result.output;
    const std::string weights = read(folder_ / "run" / "model.safetensors");
    ASSERT_FALSE(weights.empty());
    expected = expected.empty() ? weights : expected;
    EXPECT_TRUE(weights == expected);
  }
  const Result refused = run(fmt::format(
      "train {} --nproc 4 --device cpu --set parallelism.post_forward_ranks=3",
      config()));
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(
      refused.output,
      HasSubstr("post_forward_ranks to be a divisor of the 4 ranks"));
}

TEST_F(Program, AFailingRankEndsAll) {
  write_config();
  const Result failed =
      run("train " + config() +
          " --nproc 2 --device cpu --set data.train=/none/corpus");
  EXPECT_NE(failed.code, 0);
  EXPECT_THAT(failed.output, HasSubstr("/none/corpus"));
  EXPECT_THAT(failed.output, HasSubstr("rank"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "model.safetensors"));
}

}  // namespace
}  // namespace flatshard
