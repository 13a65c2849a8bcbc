#include "flatshard/train/run/trainer.h"

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/models/flops.h"
#include "flatshard/train/setup/memory_check.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/tools/evaluate.h"
#include "flatshard/train/tools/generate_text.h"
#include "flatshard/train/tools/stored_model.h"
#include "tests/support/counted_operation.h"
#include "tests/support/message_of.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <fstream>
#include <map>
#include <set>

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Returns the tolerance of losses after `steps` steps, with other numbers of
/// sequences in a matmul: sums over at most 352 tokens of a step or
/// validation.
double loss_tolerance(int steps) {
  return testing::sum_tolerance(
      {.addends = 352,
       .in_a_row = testing::sums_of_steps(/*layers=*/2, steps)});
}

using testing::learnable_text;
using testing::Settings;

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    data::write_byte_corpus(
        folder_ / "corpus",
        {learnable_text(300), learnable_text(100)},
        0.2);
  }

  Config config(const Settings& overrides = {}) const {
    return testing::small_config(
        testing::byte_run(
            folder_.path(),
            "run",
            {"training.steps=12",
             "training.local_batch_size=4",
             "optimizer.lr=1e-2",
             "metrics.log_freq=4"}),
        overrides);
  }

  std::filesystem::path run() const { return folder_ / "run"; }

  /// Trains on one rank; returns what was printed.
  std::string train(
      const std::vector<std::string>& overrides = {},
      const std::string& device = "cpu",
      bool resume = false) const {
    return testing::train_printed(config(overrides), resume, device);
  }

  std::string refusal(
      const std::vector<std::string>& overrides,
      const std::string& device = "cpu") const {
    return testing::message_of([&] { train(overrides, device); });
  }

  std::vector<json> metrics() const { return testing::metric_rows(run()); }

  std::vector<double> losses() const { return testing::logged_losses(run()); }

  /// Returns the last validation's row, without the fields that differ between
  /// runs.
  json last_validation() const {
    json found = testing::metric_rows(run(), "validation_loss").back();
    found.erase("time");
    found.erase("attempt");
    return found;
  }

  TempFolder folder_;
};

TEST_F(TrainerTest, LearnsAndWritesItsRun) {
  const std::string printed = train(
      {"training.steps=60",
       "model.max_seq_len=64",
       "metrics.log_freq=10",
       "validation.freq=30",
       "validation.sequences=8"});
  EXPECT_THAT(printed, HasSubstr("step: 10/60  loss: "));
  EXPECT_THAT(printed, HasSubstr("step: 60  validation_loss: "));
  EXPECT_THAT(printed, HasSubstr("optimizer state"));
  // Not what is as by default: config.toml has that.
  EXPECT_THAT(printed, HasSubstr("] steps = 60, seq_len = 32, local_batch"));
  EXPECT_THAT(printed, ::testing::Not(HasSubstr("zero3\"")));
  EXPECT_THAT(printed, HasSubstr("KFLOP per token"));

  std::vector<std::int64_t> steps;
  std::vector<std::int64_t> validated;
  double validation_loss = 0;
  for (const json& row : metrics()) {
    if (row.contains("validation_loss")) {
      validated.push_back(row["step"]);
      validation_loss = row["validation_loss"];
      continue;
    }
    if (row.contains("start")) {
      EXPECT_EQ(row["step"], 0);
      EXPECT_EQ(row["start"]["ranks"], 1);
      EXPECT_EQ(row["start"]["steps"], 60);
      EXPECT_EQ(row["start"]["tokens_per_step"], 4 * 32);
      EXPECT_TRUE(row["start"]["environment"].contains("torch"));
      continue;
    }
    if (row.contains("ended")) {
      continue;
    }
    EXPECT_EQ(row["tokens"], 4 * 32 * row["step"].get<std::int64_t>());
    steps.push_back(row["step"]);
    for (const char* key :
         {"loss",
          "grad_norm",
          "lr",
          "step_ms",
          "data_ms",
          "host_ms",
          "exposed_comm_ms",
          "tokens_per_s",
          "tokens_per_s_per_rank",
          "memory_allocated_bytes",
          "memory_peak_bytes",
          "memory_reserved_bytes",
          "memory_total_bytes"}) {
      ASSERT_TRUE(row.contains(key)) << key;
      EXPECT_TRUE(row[key].is_number()) << key;
    }
    EXPECT_GT(row["grad_norm"], 0);
    EXPECT_GT(row["step_ms"], 0);
    EXPECT_NEAR(
        row["tokens_per_s_per_rank"].get<double>(),
        4 * 32 / (row["step_ms"].get<double>() * 1e-3),
        1);
  }
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 10, 20, 30, 40, 50, 60}));
  EXPECT_EQ(validated, (std::vector<std::int64_t>{30, 60}));
  // From the loss of 257 equal chances to a text that repeats.
  EXPECT_NEAR(losses().front(), std::log(257.0), 0.5);
  EXPECT_LT(losses().back(), 1.0);
  EXPECT_NEAR(validation_loss, losses().back(), 0.5);
  EXPECT_EQ(load_config(run() / "config.toml").training.global_batch_size, 4);

  const GenerateOptions options{
      .run = run(),
      .prompt = "the quick",
      .max_new_tokens = 12,
      .temperature = 0,
      .device = "cpu"};
  const std::string generated = generate_text(options);
  EXPECT_THAT(generated, ::testing::StartsWith("the quick"));
  EXPECT_GT(generated.size(), options.prompt.size());
  EXPECT_EQ(generate_text(options), generated);
  // It has learnt the only text there is: these are the trained weights.
  EXPECT_EQ(generated, "the quick brown fox j");
  std::vector<std::string> texts;
  generate_texts(
      options,
      {"the quick", "fox jumps"},
      [&](const std::string& text) { texts.push_back(text); });
  ASSERT_EQ(texts.size(), 2U);
  EXPECT_EQ(texts[0], generated);
  EXPECT_THAT(texts[1], ::testing::StartsWith("fox jumps"));

  // With the run's training.seq_len, not the model's longest sequence.
  EvaluateOptions evaluated{
      .model = run(),
      .data = (folder_ / "corpus").string(),
      .sequences = 8,
      .batch_size = 3,
      .device = "cpu"};
  const Evaluated found = evaluate(evaluated);
  EXPECT_EQ(found.seq_len, 32);
  EXPECT_NEAR(found.metrics.loss, validation_loss, loss_tolerance(1));
  EXPECT_EQ(json::parse(to_json(found))["sequences"], found.sequences);
  EXPECT_TRUE(found.metrics.bits_per_byte.has_value());
  evaluated.seq_len = 64;
  EXPECT_EQ(evaluate(evaluated).seq_len, 64);
  evaluated.seq_len = 1'000'000;
  EXPECT_THROW(evaluate(evaluated), Error);
  EXPECT_THROW(
      evaluate({.model = run(), .data = (folder_ / "none").string()}),
      Error);
}

TEST_F(TrainerTest, ValidationDoesNotDependOnTheBatch) {
  std::string varied;
  for (int i = 0; i < 400; ++i) {
    varied += fmt::format("{} squared is {}\n", i, i * i);
  }
  data::write_byte_corpus(folder_ / "squares", {varied}, 0.1);
  const auto validate = [&](std::vector<std::string> overrides) {
    // The initial weights of the seed: they are the same.
    overrides.insert(
        overrides.end(),
        {"data.train=" + (folder_ / "squares").string(),
         "training.steps=1",
         "optimizer.lr=0",
         "validation.freq=1"});
    train(overrides);
    return last_validation();
  };
  const json first = validate({"validation.sequences=11"});
  const double reference = first["validation_loss"];
  EXPECT_NEAR(first["perplexity"], std::exp(reference), 1e-9);
  // 352 targets, all of them within the one document.
  EXPECT_NEAR(first["bits_per_byte"], reference / std::log(2.0), 1e-9);
  for (const std::vector<std::string>& batch :
       std::vector<std::vector<std::string>>{
           {"training.global_batch_size=8"},
           {"training.global_batch_size=16", "training.local_batch_size=16"},
           {"training.local_batch_size=1"}}) {
    auto overrides = batch;
    overrides.emplace_back("validation.sequences=11");
    EXPECT_NEAR(
        validate(overrides)["validation_loss"],
        reference,
        loss_tolerance(1))
        << batch[0];
  }
  // The complete split. Its end-of-document token is not a byte.
  const auto split = data::Corpus::open(folder_ / "squares", "validation");
  const std::int64_t whole = (split->num_tokens() - 1) / 32;
  const json all = validate({"validation.sequences=-1"});
  EXPECT_EQ(all, validate({fmt::format("validation.sequences={}", whole)}));
  EXPECT_EQ(all, validate({"validation.sequences=1000000"}));
  EXPECT_NE(all["validation_loss"], reference);
  EXPECT_THAT(
      refusal(
          {"data.train=random",
           "validation.freq=1",
           "validation.sequences=-1"}),
      HasSubstr("random tokens have no end"));
}

TEST_F(TrainerTest, AMixtureGoesOnWhereItStopped) {
  data::write_byte_corpus(folder_ / "sevens", {std::string(20000, '7')}, 0.1);
  const auto mixture = [&](double weight) {
    return fmt::format(
        "data.train=[{{path = '{}', weight = 3}}, {{path = '{}', weight = "
        "{}}}]",
        (folder_ / "corpus").string(),
        (folder_ / "sevens").string(),
        weight);
  };
  std::vector<std::string> overrides{
      mixture(1),
      "metrics.log_freq=1",
      "training.steps=8",
      "lr_scheduler.name=constant",
      "checkpoint.interval=4",
      "validation.freq=8",
      "validation.sequences=8"};
  train(overrides);
  const auto whole = losses();
  const json row = last_validation();
  // Six sequences of one, two of the other.
  const json parts = row["validation_losses"];
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_NEAR(
      row["validation_loss"],
      0.75 * parts[(folder_ / "corpus").string()].get<double>() +
          0.25 * parts[(folder_ / "sevens").string()].get<double>(),
      1e-9);
  EXPECT_TRUE(row.contains("bits_per_byte"));

  const auto resume = [&] {
    overrides.emplace_back("checkpoint.load_step=4");
    train(overrides, "cpu", /*resume=*/true);
  };
  resume();
  const auto all = losses();
  ASSERT_EQ(all.size(), 12U);
  EXPECT_EQ(
      (std::vector<double>(all.begin() + 8, all.end())),
      (std::vector<double>(whole.begin() + 4, whole.end())));
  overrides[0] = mixture(2);
  try {
    resume();
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("other datasets or weights"));
  }
  const std::string generated = generate_text(
      {.run = run(), .prompt = "a", .max_new_tokens = 2, .device = "cpu"});
  EXPECT_THAT(generated, ::testing::StartsWith("a"));
}

TEST_F(TrainerTest, AResumedRunNamesWhatChangedItsSchedule) {
  const auto log = [&](const std::string& steps, const std::string& name) {
    ::testing::internal::CaptureStderr();
    train(
        {"checkpoint.interval=2",
         "training.steps=" + steps,
         "lr_scheduler.name=" + name},
        "cpu",
        /*resume=*/true);
    return ::testing::internal::GetCapturedStderr();
  };
  log("2", "constant");
  // A constant rate does not depend on the number of steps.
  EXPECT_THAT(
      log("3", "constant"),
      ::testing::Not(HasSubstr("schedule differs")));
  EXPECT_THAT(
      log("4", "linear"),
      HasSubstr("lr_scheduler.name = \"linear\" (was \"constant\"), "
                "training.steps = 4 (was 3)"));
}

/// States in other formats train like float32, resume exactly, and load in
/// another format.
TEST_F(TrainerTest, StatesInOtherFormats) {
  const std::vector<std::string> base{
      "metrics.log_freq=1",
      "model.dim=64",
      "model.ffn_dim=160",
      "training.steps=12",
      "checkpoint.interval=6",
      "precision.compute=bfloat16",
      "lr_scheduler.name=constant"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    return more;
  };
  const auto resume = [&](const std::vector<std::string>& overrides) {
    train(overrides, "cpu", /*resume=*/true);
    const auto all = losses();
    return std::vector<double>(all.end() - 6, all.end());
  };
  train(with({}));
  const double float32 = losses().back();
  const std::string load = "checkpoint.load_step=6";
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"optimizer.state_dtype=int8"},
        {"optimizer.state_dtype=bfloat16"},
        {"optimizer.param_groups=[{pattern = 'mlp', state_dtype = 'int8'}, "
         "{pattern = 'q_proj', state_dtype = 'bfloat16'}]"},
        {"optimizer.state_dtype=int8",
         "precision.main_params=bfloat16",
         "optimizer.stochastic_rounding=true"}}) {
    std::filesystem::remove_all(run());
    train(with(keys));
    const auto whole = losses();
    EXPECT_NEAR(whole.back(), float32, 0.05) << keys[0];
    std::vector<std::string> again = keys;
    again.push_back(load);
    EXPECT_EQ(
        resume(with(again)),
        (std::vector<double>(whole.begin() + 6, whole.end())))
        << keys[0];
  }
  // Loaded as float32 with bfloat16 weights that are not rounded at random.
  EXPECT_NEAR(
      resume(with({load, "precision.main_params=bfloat16"})).back(),
      float32,
      0.2);
  EXPECT_THAT(
      refusal(with(
          {"optimizer.state_dtype=int8", "parallelism.granularity=chunk"})),
      HasSubstr("chunks split blocks of 256 elements"));
  EXPECT_THAT(
      refusal(with({"optimizer.stochastic_rounding=true"})),
      HasSubstr("it is for bfloat16 main weights"));
}

TEST_F(TrainerTest, GeneratesFromWhatARunLeaves) {
  const std::vector<std::string> overrides{
      "training.steps=4",
      "checkpoint.interval=2",
      "checkpoint.export_hf_at_end=true"};
  train(overrides);
  const auto generate = [&](const std::filesystem::path& from,
                            std::int64_t step = -1) {
    return generate_text(
        {.run = from,
         .step = step,
         .prompt = "the quick",
         .max_new_tokens = 3,
         .temperature = 0,
         .device = "cpu"});
  };
  const auto weights = run() / "model.safetensors";
  const auto checkpoints = run() / "checkpoints";
  const std::string expected = generate(run());
  EXPECT_EQ(generate(checkpoints / "step-4"), expected);
  EXPECT_EQ(generate(checkpoints), expected);
  EXPECT_EQ(generate(run() / "hf"), expected);  // bytes need no Python
  EXPECT_EQ(generate(run(), 2), generate(checkpoints / "step-2"));

  // Whatever the time of a file is.
  const auto now = std::filesystem::last_write_time(
      checkpoints / "step-4" / "manifest.json");
  std::filesystem::last_write_time(weights, now - std::chrono::hours(1));
  EXPECT_EQ(open_model(run(), -1).what, weights.string());
  // A run that has not ended, in a folder with weights of an earlier end.
  std::filesystem::rename(run() / "metrics.jsonl", run() / "rows");
  EXPECT_THAT(
      open_model(run(), -1).what,
      ::testing::EndsWith("checkpoints/step-4"));
  std::filesystem::rename(run() / "rows", run() / "metrics.jsonl");
  // Interrupted.
  std::filesystem::remove(weights);
  EXPECT_EQ(generate(run()), expected);
  EXPECT_THAT(
      open_model(run(), -1).what,
      ::testing::EndsWith("checkpoints/step-4"));

  const auto refused = [&](const std::filesystem::path& from,
                           std::int64_t step = -1) {
    try {
      generate(from, step);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("nothing");
  };
  EXPECT_THAT(
      refused(run(), 3),
      HasSubstr("--step: expected a checkpoint of step 3"));
  EXPECT_THAT(refused(run() / "hf", 2), HasSubstr("has no steps"));
  EXPECT_THAT(
      refused(folder_ / "corpus"),
      HasSubstr("a checkpoint (.../step-100) or a Hugging Face folder"));
  std::filesystem::remove_all(checkpoints);
  EXPECT_THAT(refused(run()), HasSubstr("has neither model.safetensors"));
}

TEST_F(TrainerTest, WeightsHaveHuggingFacesNames) {
  train({"training.steps=1"});
  const SafetensorsReader file(run() / "model.safetensors");
  std::set<std::string> names;
  for (const SafetensorsEntry& entry : file.entries()) {
    EXPECT_EQ(entry.dtype, "F32");
    names.insert(entry.name);
  }
  std::set<std::string> want{
      "model.embed_tokens.weight",
      "model.norm.weight",
      "lm_head.weight"};
  for (const char* layer : {"0", "1"}) {
    for (const char* part :
         {"input_layernorm",
          "post_attention_layernorm",
          "self_attn.q_proj",
          "self_attn.k_proj",
          "self_attn.v_proj",
          "self_attn.o_proj",
          "mlp.gate_proj",
          "mlp.up_proj",
          "mlp.down_proj"}) {
      want.insert(fmt::format("model.layers.{}.{}.weight", layer, part));
    }
  }
  EXPECT_EQ(names, want);
  EXPECT_EQ(
      file.entry("model.layers.0.self_attn.k_proj.weight").shape,
      (std::vector<std::int64_t>{16, 32}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
}

TEST_F(TrainerTest, ATiedHeadIsWrittenOnce) {
  train({"training.steps=1", "model.tie_embeddings=true"});
  const SafetensorsReader file(run() / "model.safetensors");
  EXPECT_TRUE(file.contains("model.embed_tokens.weight"));
  EXPECT_FALSE(file.contains("lm_head.weight"));
  const std::string generated = generate_text(
      {.run = run(), .prompt = "a", .max_new_tokens = 3, .device = "cpu"});
  EXPECT_THAT(generated, ::testing::StartsWith("a"));
}

TEST_F(TrainerTest, StrategyRecomputeAndMicrobatchesDoNotChangeTheRun) {
  const std::vector<std::string> common{"training.global_batch_size=4"};
  const auto losses_with = [&](std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), common.begin(), common.end());
    train(overrides);
    return losses();
  };
  const std::vector<double> reference = losses_with({});
  ASSERT_EQ(reference.size(), 4U);
  for (const std::vector<std::string>& overrides :
       std::vector<std::vector<std::string>>{
           {"training.local_batch_size=2"},
           {"parallelism.strategy=zero0", "training.local_batch_size=1"},
           {"parallelism.strategy=optim", "parallelism.granularity=row"},
           {"parallelism.granularity=block:4"},
           {"activation_checkpoint.mode=full", "parallelism.prefetch=0"},
           {"activation_checkpoint.mode=selective"},
           {"activation_checkpoint.mode=full",
            "activation_checkpoint.layers=1"},
           {"activation_checkpoint.mode=full",
            "activation_checkpoint.mlp_chunk_tokens=7"},
           {"activation_checkpoint.mode=selective",
            "activation_checkpoint.mlp_chunk_tokens=7"},
           {"activation_checkpoint.loss_chunk_tokens=7"},
           {"precision.scaling=pre_scaled_sum", "debug.comm_delay_us=200"}}) {
    const std::vector<double> other = losses_with(overrides);
    ASSERT_EQ(other.size(), reference.size());
    for (std::size_t i = 0; i < other.size(); ++i) {
      EXPECT_NEAR(other[i], reference[i], loss_tolerance(12)) << overrides[0];
    }
  }
}

TEST_F(TrainerTest, AttentionThatIsKeptChangesNoBitOfTheRun) {
  testing::CountedOperation calls(
      "aten::_scaled_dot_product_flash_attention_for_cpu");
  for (const std::vector<std::string>& overrides :
       std::vector<std::vector<std::string>>{
           {},
           {"precision.compute=bfloat16", "training.local_batch_size=1"},
           {"model.family=moe",
            "model.num_experts=4",
            "model.experts_per_token=2"}}) {
    std::vector<std::string> full = overrides;
    full.emplace_back("activation_checkpoint.mode=full");
    train(full);
    const std::vector<double> expected = losses();
    const std::int64_t twice = calls.take();
    full.emplace_back("activation_checkpoint.save=attention");
    train(full);
    EXPECT_EQ(losses(), expected);
    EXPECT_EQ(2 * calls.take(), twice);
    EXPECT_GT(twice, 0);
  }
}

// Evaluation, checkpoints, a skipped step and a rewind are between replays.
TEST_F(TrainerTest, StepsAsOneGraphChangeNoBitOfTheRun) {
  const std::vector<std::string> common{
      "training.steps=8",
      "training.seq_len=8",
      "training.local_batch_size=1",
      "training.global_batch_size=2",
      "metrics.log_freq=1",
      "validation.freq=3",
      "validation.sequences=2",
      "checkpoint.interval=3",
      "training.on_nonfinite=rewind",
      "debug.spoil_gradient_step=5"};
  const auto rows = [&](std::vector<std::string> overrides) {
    std::filesystem::remove_all(run());
    overrides.insert(overrides.end(), common.begin(), common.end());
    train(overrides);
    std::vector<json> values;
    for (json row : metrics()) {
      for (const char* value : {"loss", "grad_norm", "validation_loss"}) {
        if (row.contains(value)) {
          values.push_back({row["step"], value, row[value]});
        }
      }
    }
    return values;
  };
  const std::vector<json> eager = rows({});
  const std::vector<json> graphs =
      rows({"cuda_graph.impl=full_iteration", "debug.emulate_graphs=true"});
  EXPECT_GT(eager.size(), 16U);
  EXPECT_EQ(eager, graphs);
  const json last = [&] {
    for (const json& row : metrics()) {
      if (row.contains("cuda_graph")) {
        return row["cuda_graph"];
      }
    }
    return json();
  }();
  // Steps 4 and 5 run twice.
  EXPECT_EQ(last["step_replays"], 8 + 2 - 3);
  EXPECT_EQ(last["captures"], 1);
  EXPECT_TRUE(last["fallbacks"].empty());
}

TEST_F(TrainerTest, ThereAreNoGraphsOnCpus) {
  for (const char* impl : {"unit", "full_iteration"}) {
    EXPECT_THAT(
        refusal({fmt::format("cuda_graph.impl={}", impl)}),
        HasSubstr("requires a mesh of GPUs, got cpu"));
  }
}

TEST_F(TrainerTest, TheLeastMemoryIsWhatItTakesAndNoMore) {
  for (const std::vector<std::string>& overrides :
       std::vector<std::vector<std::string>>{
           {},
           {"parallelism.strategy=zero0"},
           {"precision.reduce=bfloat16", "precision.compute=bfloat16"},
           {"optimizer.name=sgd"},
           {"optimizer.name=sgd", "optimizer.momentum=0.9"}}) {
    const Config c = config(overrides);
    const Trainer trainer(c, {}, "cpu");
    const std::int64_t n = models::num_parameters(model_config(c));
    const std::int64_t state = c.optimizer.name == config::OptimizerName::adamw
                                   ? 8 * n
                               : c.optimizer.momentum > 0 ? 4 * n
                                                          : 0;
    std::map<std::string, std::int64_t> rows;
    for (const MemoryRow& row : memory_rows(trainer.runtime(), 0)) {
      rows[row.role] = row.nbytes;
    }
    // In one dtype the main weights are the compute weights.
    const std::int64_t weights = rows["main weights"] > 0
                                     ? rows["main weights"]
                                     : rows["compute weights"];
    const std::int64_t taken = weights + rows["gradients"] + state;
    const models::ModelConfig shape = model_config(c);
    const LeastMemoryOptions options = run_options(c, shape).least_memory;
    const std::int64_t least = least_memory(options, shape, 1);
    EXPECT_LE(least, taken);
    EXPECT_GE(static_cast<double>(least), 0.9 * static_cast<double>(taken));
    const bool shards = c.parallelism.strategy.name() != "zero0";
    EXPECT_EQ(least_memory(options, shape, 4), shards ? least / 4 : least);
  }
}

TEST_F(TrainerTest, TheLeastMemoryIsOfTheShardsOfTheStrategy) {
  const auto least = [&](const std::string& strategy) {
    const Config c = config(
        {"parallelism.strategy=" + strategy,
         "parallelism.data_parallel_replicate_degree=2"});
    const models::ModelConfig shape = model_config(c);
    return least_memory(run_options(c, shape).least_memory, shape, 8);
  };
  const std::int64_t whole = least("zero0");
  for (const char* name : {"zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"}) {
    EXPECT_EQ(least(name), whole / 4) << name;
  }
  EXPECT_EQ(least("hfsdp"), whole / 8);
}

// Library and trainer have the same defaults (docs/reference/defaults.md),
// except for copy engines: the trainer chooses them by the links.
TEST(Defaults, AreThoseOfTheLibrary) {
  const FullyShardOptions library;
  Config config;
  config.model.preset = "llama3_1b";
  const models::ModelConfig shape = model_config(config);
  models::Llama layers(shape);
  const FullyShardOptions trainer = model_shard_options(
      config,
      shape,
      layers,
      *Mesh::single(at::kCPU),
      CopyEngines{},
      /*num_microbatches=*/2);
  EXPECT_EQ(trainer.strategy, library.strategy);
  EXPECT_EQ(trainer.granularity, library.granularity);
  EXPECT_EQ(trainer.seed, library.seed);
  const ParamGroupOptions& group = trainer.group;
  EXPECT_TRUE(group.precision == library.group.precision);
  EXPECT_EQ(group.precision.reduce, at::kFloat);
  EXPECT_EQ(group.scaling, library.group.scaling);
  EXPECT_EQ(group.grad_divisor, library.group.grad_divisor);
  EXPECT_EQ(group.keep_compute_weights, library.group.keep_compute_weights);
  EXPECT_EQ(group.post_forward_ranks, library.group.post_forward_ranks);
  EXPECT_EQ(group.offload, library.group.offload);
  EXPECT_EQ(group.alignment, library.group.alignment);
  EXPECT_EQ(trainer.max_padding, library.max_padding);
  const RuntimeOptions& runtime = trainer.runtime;
  EXPECT_EQ(runtime.prefetch, library.runtime.prefetch);
  EXPECT_EQ(
      runtime.reshard_after_forward,
      library.runtime.reshard_after_forward);
  EXPECT_EQ(runtime.slots_on_demand, library.runtime.slots_on_demand);
  EXPECT_EQ(runtime.copy_engines.gathers, library.runtime.copy_engines.gathers);
}

TEST_F(TrainerTest, OtherOptimizersAndPrecision) {
  train(
      {"optimizer.name=sgd",
       "optimizer.momentum=0.9",
       "optimizer.lr=0.1",
       "precision.compute=bfloat16",
       "lr_scheduler.name=wsd",
       "lr_scheduler.warmup_steps=2",
       "training.max_norm=0"});
  EXPECT_LT(losses().back(), losses().front() - 0.5);
}

TEST_F(TrainerTest, MuonLearns) {
  const std::string printed =
      train({"optimizer.name=muon", "optimizer.lr=0.02"});
  EXPECT_LT(losses().back(), losses().front() - 0.5);
  EXPECT_THAT(printed, HasSubstr("muon, lr x 1, weight decay 0.1, momentum"));
  EXPECT_THAT(printed, HasSubstr("the rest, no matrices"));
}

TEST_F(TrainerTest, TheDefaultMomentumIsOfTheGroupsAlgorithm) {
  const std::string of_muon = train(
      {"optimizer.name=muon",
       "optimizer.param_groups=[{pattern = 'norm', name = 'sgd'}]",
       "training.steps=1"});
  EXPECT_THAT(
      of_muon,
      HasSubstr("sgd, lr x 1, weight decay 0.1, momentum 0\n"));
  const std::string of_sgd = train(
      {"optimizer.name=sgd",
       "optimizer.param_groups=[{pattern = 'mlp', name = 'muon'}]",
       "training.steps=1"});
  EXPECT_THAT(
      of_sgd,
      HasSubstr("muon, lr x 1, weight decay 0.1, momentum 0.95"));
  EXPECT_THAT(of_sgd, HasSubstr("sgd, lr x 1, weight decay 0.1, momentum 0\n"));
}

TEST_F(TrainerTest, ParameterGroupsThatChangeNothing) {
  train({});
  const std::vector<double> reference = losses();
  const std::string printed =
      train({"optimizer.param_groups=[{pattern = 'norm'}, {pattern = 'mlp'}]"});
  EXPECT_EQ(losses(), reference);
  EXPECT_THAT(
      printed,
      HasSubstr("group     parameters         elements  values\n"
                "norm               5              160  adamw, lr x 1, weight "
                "decay 0.1, betas 0.9 and 0.95, eps 1e-08\n"));
}

TEST_F(TrainerTest, ParameterGroupsDoNotDependOnTheStrategy) {
  const std::vector<std::string> groups{
      "optimizer.decay=matrices",
      "optimizer.param_groups=[{pattern = 'q_proj', lr_mult = 0.1, eps = 1e-3},"
      "{pattern = 'embed_tokens', name = 'sgd', momentum = 0.5},"
      "{pattern = 'model.norm', wd_mult = 2, beta1 = 0.5}]"};
  train({});
  const std::vector<double> without = losses();
  train(groups);
  const std::vector<double> reference = losses();
  EXPECT_NE(reference.back(), without.back());
  for (const std::string strategy : {"zero0", "zero2", "zero3"}) {
    std::vector<std::string> overrides = groups;
    overrides.push_back("parallelism.strategy=" + strategy);
    overrides.push_back("parallelism.granularity=block:4");
    overrides.push_back("optimizer.overlap=true");
    train(overrides);
    EXPECT_EQ(losses(), reference) << strategy;
  }
}

// A run that resumes has the values of its config.
TEST_F(TrainerTest, ParameterGroupsResume) {
  const auto with = [](const std::string& lr_mult, std::string more) {
    return std::vector<std::string>{
        "optimizer.param_groups=[{pattern = 'proj', lr_mult = " + lr_mult +
            "}, {pattern = 'norm', name = 'sgd', momentum = 0.5}]",
        "checkpoint.interval=6",
        "metrics.log_freq=1",
        std::move(more)};
  };
  train(with("0.5", "checkpoint.keep_latest_k=0"));
  const double reference = losses().back();
  const auto resumed = [&](const std::string& lr_mult) {
    train(with(lr_mult, "checkpoint.load_step=6"), "cpu", /*resume=*/true);
    return losses().back();
  };
  EXPECT_EQ(resumed("0.5"), reference);
  EXPECT_NE(resumed("0.25"), reference);
}

TEST_F(TrainerTest, ActivationsInHostMemoryChangeNothing) {
  const std::string on = "activation_checkpoint.offload=true";
  const std::vector<std::string> full{
      "training.steps=4",
      "metrics.log_freq=1",
      "activation_checkpoint.mode=full"};
  train(full);
  const std::vector<double> reference = losses();
  std::vector<std::string> offloaded = full;
  offloaded.push_back(on);
  EXPECT_THAT(train(offloaded), HasSubstr("on the host\n  activations"));
  EXPECT_EQ(losses(), reference);
  EXPECT_THAT(
      refusal({on}),
      HasSubstr("set activation_checkpoint.mode to full or selective"));
  offloaded.emplace_back("cuda_graph.impl=unit");
  EXPECT_THAT(
      refusal(offloaded),
      HasSubstr("a graph reads what its block stores at fixed addresses"));
}

TEST_F(TrainerTest, OffloadedStatesChangeNothing) {
  const auto with = [](const std::string& more) {
    return std::vector<std::string>{
        "optimizer.state_dtype=bfloat16",
        "optimizer.overlap=true",
        "checkpoint.interval=6",
        "checkpoint.keep_latest_k=0",
        "metrics.log_freq=1",
        more};
  };
  const std::string on = "optimizer.offload_states=true";
  const std::string off = "optimizer.offload_states=false";
  train(with(off));
  const std::vector<double> reference = losses();
  // A checkpoint is read by a run with the other value.
  const auto resumed = [&](const std::string& more) {
    auto overrides = with(more);
    overrides.push_back("checkpoint.load_step=6");
    train(overrides, "cpu", /*resume=*/true);
    return losses().back();
  };
  EXPECT_EQ(resumed(on), reference.back());
  EXPECT_THAT(
      train(with(on)),
      AllOf(
          HasSubstr("two buffers for the states that are updated"),
          HasSubstr("on the host\n  optimizer state")));
  EXPECT_EQ(losses(), reference);
  EXPECT_EQ(resumed(off), reference.back());
  EXPECT_THAT(
      refusal({on, "optimizer.name=muon"}),
      HasSubstr("states of Muon cannot be offloaded"));
  EXPECT_THAT(
      refusal({on, "optimizer.name=sgd"}),
      HasSubstr("SGD without momentum has no states"));
}

TEST_F(TrainerTest, APatternWithoutAMatchNamesNearOnes) {
  EXPECT_THAT(
      refusal({"optimizer.param_groups=[{pattern = 'k_porj'}]"}),
      HasSubstr(
          "pattern \"k_porj\" matches no parameter that is trained. Names "
          "near it: model.layers.0.self_attn.k_proj"));
}

TEST_F(TrainerTest, RandomTokens) {
  train({"data.train=random", "training.steps=2"});
  EXPECT_NEAR(losses().front(), std::log(257.0), 0.5);
  try {
    generate_text({.run = run(), .prompt = "a", .device = "cpu"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("--corpus"));
  }
  const std::string generated = generate_text(
      {.run = run(),
       .prompt = "a",
       .max_new_tokens = 2,
       .device = "cpu",
       .corpus = (folder_ / "corpus").string()});
  EXPECT_THAT(generated, ::testing::StartsWith("a"));
}

TEST_F(TrainerTest, WritesATrace) {
  const std::string printed =
      train({"profiling.enabled=true", "profiling.step=2", "training.steps=2"});
  // Without a GPU it prints the host's time.
  EXPECT_THAT(printed, HasSubstr("CPU time by operator: "));
  EXPECT_THAT(printed, HasSubstr("  aten::mm"));
  std::ifstream file(run() / "profile" / "step_2_rank_0.json");
  ASSERT_TRUE(file.good());
  EXPECT_TRUE(json::parse(file).contains("traceEvents"));
}

TEST_F(TrainerTest, ErrorsNameTheOption) {
  EXPECT_THAT(refusal({"data.train=/none/corpus"}), HasSubstr("/none/corpus"));
  EXPECT_THAT(
      refusal({"training.global_batch_size=6"}),
      HasSubstr("training.global_batch_size = 6"));
  EXPECT_THAT(
      refusal({"parallelism.strategy=zero4"}),
      HasSubstr("parallelism.strategy"));
  EXPECT_THAT(
      refusal({"model.max_seq_len=16"}),
      HasSubstr("training.seq_len = 32"));
  EXPECT_THAT(refusal({"training.seq_len=100000"}), HasSubstr("seq_len"));
  EXPECT_THAT(refusal({}, "tpu"), HasSubstr("--device"));
  EXPECT_THAT(refusal({"model.vocab_size=100"}), HasSubstr("vocab_size"));
  EXPECT_THAT(
      refusal({"model.layers=4096", "model.dim=16384", "model.ffn_dim=65536"}),
      HasSubstr("use more ranks, or a parallelism.strategy that shards more"));
  EXPECT_THAT(
      refusal({"parallelism.data_parallel_shard_degree=2"}),
      HasSubstr("data_parallel_shard_degree"));
  try {
    generate_text({.run = folder_ / "none", .device = "cpu"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("--run"));
  }
}

TEST_F(TrainerTest, ALossThatIsNotFiniteEndsTheRun) {
  EXPECT_THAT(
      refusal(
          {"optimizer.name=sgd",
           "optimizer.lr=1e30",
           "training.max_norm=0",
           "metrics.log_freq=1"}),
      HasSubstr("optimizer.lr"));
}

}  // namespace
}  // namespace flatshard
