// Runs of models with experts.
#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/tools/export_hf.h"
#include "flatshard/train/tools/generate_text.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fstream>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::Settings;

class MoeTrainer : public ::testing::Test {
 protected:
  MoeTrainer() {
    data::write_byte_corpus(
        folder_ / "corpus",
        {testing::learnable_text(300)},
        0.2);
  }

  std::filesystem::path run(const std::string& name) const {
    return folder_ / name;
  }

  Config config(const std::string& name, const Settings& overrides) const {
    return testing::small_config(
        testing::byte_run(
            folder_.path(),
            name,
            {"model.family=moe",
             "model.num_experts=4",
             "model.moe_ffn_dim=32",
             "training.steps=12",
             "training.local_batch_size=4",
             "training.global_batch_size=8",
             "optimizer.lr=1e-2"}),
        overrides);
  }

  struct Outcome {
    std::string output;
    std::vector<nlohmann::json> rows;  // of steps
  };

  Outcome train(
      const std::string& name,
      const Settings& overrides,
      bool resume = false) const {
    Outcome outcome{
        .output = testing::train_printed(config(name, overrides), resume)};
    outcome.rows = testing::metric_rows(run(name), "loss");
    return outcome;
  }

  std::string refusal(const std::vector<std::string>& overrides) const {
    return testing::message_of([&] { train("refused", overrides); });
  }

  const TempFolder folder_;
};

TEST_F(MoeTrainer, LearnsAndReportsItsLoads) {
  const Outcome run = train(
      "run",
      {"moe.aux_loss=0.01",
       "moe.balance_rate=0.001",
       "moe.expert_capacity_factor=1.0",
       "model.router_score=sigmoid"});
  ASSERT_EQ(run.rows.size(), 12U);
  EXPECT_LT(
      run.rows.back()["loss"].get<double>(),
      run.rows.front()["loss"].get<double>() - 1);
  for (const auto& row : run.rows) {
    const auto& experts = row["experts"];
    EXPECT_GE(experts["load"].get<double>(), 1.0);
    EXPECT_LE(experts["load"].get<double>(), 4.0);
    EXPECT_GT(experts["dropped"].get<double>(), 0.0);
    EXPECT_LT(experts["dropped"].get<double>(), 0.6);
    EXPECT_NEAR(experts["balance"].get<double>(), 1.0, 0.3);
  }
  // It moves by the rate in each step, one way or back.
  EXPECT_NEAR(run.rows[0]["experts"]["bias"].get<double>(), 0.001, 1e-7);
  EXPECT_LE(run.rows[11]["experts"]["bias"].get<double>(), 0.0121);
  EXPECT_THAT(run.output, HasSubstr(" of them active for a token"));
  EXPECT_THAT(run.output, HasSubstr("  experts: load "));
}

TEST_F(MoeTrainer, ForcedBalanceAndRunsWithoutExperts) {
  const Outcome even =
      train("even", {"debug.force_balance=true", "training.steps=2"});
  EXPECT_EQ(even.rows[1]["experts"]["load"].get<double>(), 1.0);
  EXPECT_EQ(even.rows[1]["experts"]["dropped"].get<double>(), 0.0);
  EXPECT_FALSE(even.rows[1]["experts"].contains("bias"));
}

// Attention is in FP8, experts and routers in bfloat16. The first log lines
// report it.
TEST_F(MoeTrainer, Float8LeavesExpertsInBfloat16) {
  const Outcome run = train(
      "run",
      {"training.steps=2",
       "precision.compute=bfloat16",
       "model.dim=64",
       "float8.recipe=rowwise"});
  // q, k, v and o of two blocks; two routers and their norms next to the rest.
  EXPECT_THAT(
      run.output,
      HasSubstr(
          "float8: 8 parameters with 22.9 % of the elements, rowwise "
          "(emulated), derived columns; bfloat16: 2 (257 rows are not a "
          "multiple of 16), 2 (4 rows are not a multiple of 16), 5 ([64] is "
          "not a matrix), 4 (experts)"));
  EXPECT_THAT(
      run.output,
      HasSubstr("BFloat16, except 0.0 MiB of FP8, "
                "all-gathered"));
  EXPECT_EQ(run.rows.size(), 2U);
}

TEST_F(MoeTrainer, GraphsChangeNoLoss) {
  const std::vector<std::string> plain{
      "training.steps=6",
      "moe.aux_loss=0.01",
      "model.dense_layers=1"};
  auto graphs = plain;
  for (const char* key :
       {"cuda_graph.impl=unit",
        "cuda_graph.modules=attn,mlp,moe_router",
        "cuda_graph.warmup_steps=2",
        "cuda_graph.on_miss=error",
        "debug.emulate_graphs=true"}) {
    graphs.emplace_back(key);
  }
  const Outcome want = train("plain", plain);
  const Outcome got = train("graphs", graphs);
  ASSERT_EQ(got.rows.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(got.rows[i]["loss"], want.rows[i]["loss"]) << i;
    EXPECT_EQ(got.rows[i]["grad_norm"], want.rows[i]["grad_norm"]) << i;
  }
  // Two attentions, a dense layer and a router, two microbatches in four steps.
  std::ifstream file(run("graphs") / "metrics.jsonl");
  const std::string metrics((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(metrics, HasSubstr("\"forward_replays\":32"));
  EXPECT_THAT(metrics, HasSubstr("\"backward_replays\":32"));
}

// Biases are part of a checkpoint: the run continues as if it had not stopped.
TEST_F(MoeTrainer, ACheckpointHasTheBiases) {
  const std::vector<std::string> common{
      "moe.balance_rate=0.05",
      "checkpoint.interval=2",
      "lr_scheduler.name=constant",
      "activation_checkpoint.mode=full"};
  const auto with_steps = [&](int steps) {
    auto overrides = common;
    overrides.push_back(fmt::format("training.steps={}", steps));
    return overrides;
  };
  const Outcome whole = train("whole", with_steps(6));
  train("parts", with_steps(2));
  const Outcome parts = train("parts", with_steps(6), /*resume=*/true);
  ASSERT_EQ(parts.rows.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(parts.rows[i]["loss"], whole.rows[i]["loss"]) << i;
    EXPECT_EQ(
        parts.rows[i]["experts"]["bias"],
        whole.rows[i]["experts"]["bias"])
        << i;
  }
  // And so are the weights that a run leaves, and its checkpoint.
  const auto generate = [&](const std::filesystem::path& from) {
    return generate_text(
        {.run = from,
         .prompt = "the quick",
         .max_new_tokens = 3,
         .temperature = 0,
         .device = "cpu"});
  };
  const std::string expected =
      generate(run("parts") / "checkpoints" / "step-6");
  EXPECT_EQ(generate(run("whole")), expected);
  std::filesystem::remove_all(run("whole") / "checkpoints");
  EXPECT_EQ(generate(run("whole")), expected);
  const SafetensorsReader weights(run("whole") / "model.safetensors");
  EXPECT_EQ(
      weights.entry("model.layers.1.mlp.experts.3.up_proj.weight").shape,
      (std::vector<std::int64_t>{32, 32}));
  EXPECT_EQ(
      weights.entry("model.layers.0.mlp.gate.e_score_correction_bias").shape,
      (std::vector<std::int64_t>{4}));
  try {
    export_hf({.run = run("parts"), .to = folder_ / "hf"});
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("moe has no config.json"));
  }
}

// A run continues with it, or without.
TEST_F(MoeTrainer, TwoMicrobatchesAtOnceChangeNoLoss) {
  const std::vector<std::string> common{
      "moe.balance_rate=0.05",
      "moe.aux_loss=0.01",
      "model.shared_experts=1",
      "lr_scheduler.name=constant",
      // A norm adds up unit by unit, and the units are others.
      "training.max_norm=1e6",
      "validation.freq=2",
      "validation.sequences=4",
      "checkpoint.interval=2"};
  const auto with = [&](int steps, const std::vector<std::string>& more) {
    auto overrides = common;
    overrides.push_back(fmt::format("training.steps={}", steps));
    overrides.insert(overrides.end(), more.begin(), more.end());
    return overrides;
  };
  const std::vector<std::string> both{
      "parallelism.overlap_expert_parallel=true",
      "parallelism.delay_wgrad=true",
      "activation_checkpoint.mode=full"};
  const Outcome plain = train("plain", with(6, {}));
  const Outcome begun = train("overlapped", with(2, both));
  EXPECT_THAT(
      begun.output,
      HasSubstr("2 microbatches per step, 2 in flight, weight gradients "
                "after the others"));
  train("overlapped", with(4, {}), /*resume=*/true);
  const Outcome got = train("overlapped", with(6, both), /*resume=*/true);
  ASSERT_EQ(got.rows.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(got.rows[i]["loss"], plain.rows[i]["loss"]) << i;
    EXPECT_EQ(got.rows[i]["grad_norm"], plain.rows[i]["grad_norm"]) << i;
    EXPECT_EQ(got.rows[i]["experts"]["bias"], plain.rows[i]["experts"]["bias"])
        << i;
  }
}

TEST_F(MoeTrainer, ExportsAndStartsFromPerExpertEntries) {
  train(
      "run",
      {"model.family=qwen3_moe",
       "training.steps=2",
       "checkpoint.interval=2",
       "checkpoint.export_hf_at_end=true"});
  const auto hf = run("run") / "hf";
  const SafetensorsReader exported(hf / "model.safetensors");
  EXPECT_EQ(
      exported.entry("model.layers.1.mlp.experts.0.down_proj.weight").shape,
      (std::vector<std::int64_t>{32, 32}));
  const std::vector<std::string> start{
      "model.family=qwen3_moe",
      "model.init_from=" + hf.string(),
      "training.steps=1",
      "optimizer.lr=0",
      "checkpoint.interval=1",
      "checkpoint.export_hf_at_end=true"};
  train("again", start);
  std::ifstream a(hf / "model.safetensors");
  std::ifstream b(run("again") / "hf" / "model.safetensors");
  const std::string before((std::istreambuf_iterator<char>(a)), {});
  const std::string after((std::istreambuf_iterator<char>(b)), {});
  EXPECT_FALSE(before.empty());
  EXPECT_TRUE(before == after);
}

TEST_F(MoeTrainer, WhatDoesNotFitIsRefusedByName) {
  EXPECT_THAT(
      refusal({"model.experts_per_token=5"}),
      HasSubstr("model.experts_per_token: expected 1 to num_experts = 4, got "
                "5"));
  EXPECT_THAT(
      refusal({"model.family=mixtral", "moe.balance_rate=0.1"}),
      HasSubstr("router_bias (moe.balance_rate)"));
  EXPECT_THAT(
      refusal({"cuda_graph.impl=unit", "debug.emulate_graphs=true"}),
      HasSubstr("cuda_graph.impl = \"unit\" with experts"));
  EXPECT_THAT(
      refusal({"cuda_graph.impl=full_iteration", "debug.emulate_graphs=true"}),
      HasSubstr("cuda_graph.impl = \"full_iteration\" with experts"));
  EXPECT_THAT(
      refusal(
          {"cuda_graph.impl=unit",
           "cuda_graph.modules=attn,mlp",
           "debug.emulate_graphs=true"}),
      HasSubstr("cuda_graph.modules: mlp is a part of blocks without experts"));
  EXPECT_THAT(
      refusal({"model.preset=llama3_1b"}),
      HasSubstr("model.family: expected llama"));
  EXPECT_THAT(refusal({"model.family=deepseek_v3"}), HasSubstr("model.family"));
}

TEST_F(MoeTrainer, ACheckpointOfOtherExpertsIsRefusedByName) {
  train("run", {"training.steps=1", "checkpoint.interval=1"});
  try {
    train("run", {"model.num_experts=8"}, /*resume=*/true);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("model.num_experts = 8, the checkpoint has 4"));
    EXPECT_THAT(error.what(), HasSubstr("expected shape [8, 32], got [4, 32]"));
  }
}

TEST(MoeKeys, ReplaceThoseOfAPreset) {
  const auto model = [](const std::string& keys) {
    return model_config(parse_config(
        "[data]\ntrain = \"random\"\n[model]\npreset = \"qwen3_30b_a3b\"\n" +
            keys,
        "test.toml"));
  };
  EXPECT_EQ(model(""), models::preset("qwen3_30b_a3b"));
  EXPECT_EQ(
      model("num_experts = 64\nexperts_per_token = 4").moe.num_experts,
      64);
  EXPECT_FALSE(model("router_normalize = false").moe.router_normalize);
  const auto dense = [](const std::string& keys) {
    try {
      model_config(parse_config(
          "[data]\ntrain = \"random\"\n[model]\npreset = "
          "\"llama3_1b\"\n[moe]\n" +
              keys,
          "test.toml"));
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("nothing");
  };
  EXPECT_EQ(
      dense("aux_loss = 0.1"),
      "moe.aux_loss is for models with experts; remove it, or set "
      "model.num_experts");
  EXPECT_EQ(
      dense("[cuda_graph]\nimpl = \"unit\"\nmodules = \"moe_router\""),
      "cuda_graph.modules: moe_router is a part of blocks with experts; use "
      "mlp, or set model.num_experts");
}

}  // namespace
}  // namespace flatshard
