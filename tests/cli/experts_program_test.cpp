// Models with experts as a user meets them: two ranks that divide them.
#include "tests/cli/bad_input.h"

#include "flatshard/format/safetensors.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ExpertRuns : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    corpus_ = new TempFolder;
    prepare_corpus(*corpus_, "--validation-fraction 0.1");
  }
  static void TearDownTestSuite() { delete corpus_; }

  /// Trains a run named `name`, below the folder.
  std::string train(const std::string& name, const std::string& more) const {
    const auto config = folder_.write(
        name + ".toml",
        fmt::format(
            R"([run]
output_dir = "{}"
[model]
family = "qwen3_moe"
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 64
vocab_size = 257
num_experts = 4
moe_ffn_dim = 32
[data]
train = "{}"
[training]
steps = 6
seq_len = 33
local_batch_size = 2
global_batch_size = 8
max_norm = 0.5
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 1
[precision]
compute = "float32"
[parallelism]
expert_parallel_degree = 2
[metrics]
log_freq = 1
)",
            (folder_ / name).string(),
            (*corpus_ / "corpus").string()));
    return fmt::format(
        "\"$PROGRAM\" train '{}' --device cpu {}",
        config.string(),
        more);
  }

  Result run(const std::string& name, const std::string& more) const {
    return sh(train(name, "--nproc 2 " + more));
  }

  /// Returns the results of a run, without their times. The balance is a mean
  /// over microbatches and ranks in an order that varies.
  std::vector<std::string> rows(
      const std::string& name,
      bool with_balance = true) const {
    std::vector<std::string> found;
    std::istringstream lines(read(folder_ / name / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      if (!row.contains("loss") && !row.contains("validation_loss")) {
        continue;
      }
      nlohmann::json kept;
      for (const char* key : {"step", "loss", "grad_norm", "validation_loss"}) {
        if (row.contains(key)) {
          kept[key] = row[key];
        }
      }
      if (row.contains("experts")) {
        for (const char* key : {"load", "dropped", "balance"}) {
          if (with_balance || key != std::string("balance")) {
            kept[key] = row["experts"][key];
          }
        }
      }
      found.push_back(kept.dump());
    }
    return found;
  }

  /// NaN in place of the first value of an entry of a run's weights on disk.
  void spoil(const std::string& name, const std::string& entry) const {
    const fs::path path = folder_ / name / "model.safetensors";
    const SafetensorsReader reader(path);
    const auto& found = reader.entry(entry);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(reader.offset(found)));
    file.write("\x00\x00\xc0\x7f", 4);
  }

  static inline TempFolder* corpus_ = nullptr;
  TempFolder folder_;
};

// Validation and dropped tokens included.
TEST_F(ExpertRuns, CopiesGiveTheLossesOfTheCollective) {
  const std::string more =
      "--set moe.aux_loss=0.01 --set moe.expert_capacity_factor=1.0 --set "
      "validation.freq=3 --set validation.sequences=5 --set "
      "parallelism.token_exchange=";
  const Result collective = run("collective", more + "collective");
  ASSERT_EQ(collective.code, 0) << collective.output;
  const Result copies = run("copies", more + "copies");
  ASSERT_EQ(copies.code, 0) << copies.output;
  EXPECT_EQ(rows("copies"), rows("collective"));
  EXPECT_EQ(rows("copies").size(), 8U);
  EXPECT_EQ(
      read(folder_ / "copies/model.safetensors"),
      read(folder_ / "collective/model.safetensors"));
  // It is copies that were asked for.
  EXPECT_THAT(copies.output, HasSubstr("windows that peers copy rows"));
  EXPECT_EQ(collective.output.find("windows that peers"), std::string::npos);
}

// Two ranks, each with half of the experts, do what one does with their batches
// as two microbatches.
TEST_F(ExpertRuns, TwoRanksGiveTheBitsOfOne) {
  const std::string more =
      " --set debug.deterministic=true --set training.global_batch_size=4 "
      "--set moe.aux_loss=0.01 --set activation_checkpoint.mode=full";
  const Result one = sh(train(
      "one",
      "--nproc 1 --set parallelism.expert_parallel_degree=1" + more));
  ASSERT_EQ(one.code, 0) << one.output;
  const Result two = run("two", more);
  ASSERT_EQ(two.code, 0) << two.output;
  EXPECT_EQ(rows("two", false), rows("one", false));
  EXPECT_EQ(
      read(folder_ / "two/model.safetensors"),
      read(folder_ / "one/model.safetensors"));
}

// Weight storage, the time of all-gathers, recomputation, and observers: no
// digit of a loss or a norm depends on them.
TEST_F(ExpertRuns, OptionsOfTheRuntimeChangeNoLoss) {
  const Result plain = run("plain", "");
  ASSERT_EQ(plain.code, 0) << plain.output;
  const std::pair<std::string, std::string> options[] = {
      {"watched",
       "--set diagnostics.nan_check=true --set diagnostics.strict=true --set "
       "diagnostics.overlap_check=true --set diagnostics.poison=true --set "
       "diagnostics.norms_freq=2"},
      {"gathered",
       "--set parallelism.strategy=zero2 --set parallelism.prefetch=3 --set "
       "parallelism.granularity=dim0 --set optimizer.overlap=true --set "
       "parallelism.token_exchange=copies"},
      {"again",
       "--set activation_checkpoint.mode=full --set "
       "parallelism.keep_compute_weights=false --set "
       "parallelism.memory_budget=0.1 --set debug.comm_delay_us=500 --set "
       "debug.comm_delay_seed=3"},
      {"replayed",
       "--set cuda_graph.impl=unit --set cuda_graph.modules=attn,moe_router "
       "--set debug.emulate_graphs=true --set cuda_graph.on_miss=error --set "
       "activation_checkpoint.mode=selective"}};
  for (const auto& [name, more] : options) {
    const Result result = run(name, more);
    ASSERT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(rows(name), rows("plain")) << name;
    EXPECT_EQ(
        read(folder_ / name / "model.safetensors"),
        read(folder_ / "plain/model.safetensors"))
        << name;
  }
}

TEST_F(ExpertRuns, AnotherNumberOfExpertsOnOneRankIsNamed) {
  const auto rank = [&](int rank, int experts) {
    return fmt::format(
        "RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT {1}",
        rank,
        train("run", fmt::format("--set model.num_experts={}", experts)));
  };
  // A port that is free now.
  const Result result =
      sh("PORT=$(python3 -c 'import socket; s = socket.socket(); "
         "s.bind((\"127.0.0.1\", 0)); print(s.getsockname()[1])')\n" +
         rank(1, 8) + " & \n" + rank(0, 4) + "\ncode=$?\nwait\nexit $code\n");
  EXPECT_NE(result.code, 0);
  EXPECT_NE(result.code, kTimedOut);
  EXPECT_THAT(
      result.output,
      HasSubstr(
          "exchange of tokens: rank 1 of the group has layers of 8 experts, "
          "rank 0 of 4; give all ranks the same model"));
  EXPECT_FALSE(fs::exists(folder_ / "run/metrics.jsonl"));
}

TEST_F(ExpertRuns, WhatDoesNotDivideIsNamed) {
  struct Case {
    std::string options;
    std::string says;
  };
  for (const Case& c :
       {Case{
            "--set model.num_experts=5",
            "parallelism.expert_parallel_degree = 2 must divide the experts "
            "of a layer, model.num_experts = 5"},
        Case{
            "--set parallelism.expert_parallel_degree=4",
            "parallelism.expert_parallel_degree = 4 must divide "
            "data_parallel_shard_degree = 2 of 2 ranks"}}) {
    const Result result = run("run", c.options);
    EXPECT_EQ(result.errors().size(), 1U) << result.output;
    EXPECT_THAT(result.output, HasSubstr(c.says));
    EXPECT_FALSE(fs::exists(folder_ / "run/metrics.jsonl")) << c.options;
  }
}

// Scores that are not finite still select experts, and rows are exchanged as
// usual. The run ends with the name of the tensor that is not finite.
TEST_F(ExpertRuns, ARouterThatIsNotFiniteIsNamed) {
  const Result whole = run("whole", "--set training.steps=1");
  ASSERT_EQ(whole.code, 0) << whole.output;
  const std::string router = "model.layers.1.mlp.gate.weight";
  spoil("whole", router);
  const std::string from = fmt::format(
      "--set model.init_from={} --set training.steps=2",
      (folder_ / "whole").string());
  const Result plain = run("plain", from);
  EXPECT_NE(plain.code, 0);
  EXPECT_NE(plain.code, kTimedOut);
  EXPECT_EQ(plain.errors().size(), 1U) << plain.output;
  EXPECT_THAT(
      plain.output,
      AllOf(HasSubstr("gradient"), HasSubstr("of parameter model.")));
  const Result checked =
      run("checked", from + " --set diagnostics.nan_check=true");
  EXPECT_NE(checked.code, 0);
  EXPECT_EQ(checked.errors().size(), 1U) << checked.output;
  EXPECT_THAT(checked.output, HasSubstr("of parameter " + router));
}

}  // namespace
}  // namespace flatshard::testing
