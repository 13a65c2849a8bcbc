// Runs that train adapters: the same on any grid of ranks, with a base that has
// no gradients, and with files of only the adapters.
#include "flatshard/core/error.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/data/batches.h"
#include "flatshard/train/run/from_config.h"
#include "flatshard/train/run/microbatches.h"
#include "flatshard/train/run/trainer.h"
#include "flatshard/train/setup/memory_check.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/train_state.h"
#include "flatshard/train/tools/evaluate.h"
#include "flatshard/train/tools/export_hf.h"
#include "flatshard/train/tools/generate_text.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using testing::Settings;

constexpr std::int64_t kLoraBatch = 12;  // sequences of a step
constexpr int kLoraSteps = 3;
// Sums over the tokens of a step, 16 in a sequence.
const double kLoraTolerance = testing::sum_tolerance(
    {.addends = kLoraBatch * 16,
     .in_a_row = testing::sums_of_steps(/*layers=*/2, kLoraSteps)});
// Two ranks share the layers.
constexpr const char* kTwoShare = "parallelism.tensor_parallel_degree=2";
// Two ranks share the sequences.
constexpr const char* kTwoOfASequence = "parallelism.context_parallel_degree=2";
// Above the adapters of wide models below, and under the weights of a block.
constexpr std::int64_t kSmallNbytes = 64 << 10;

Config
adapter_config(int world, int microbatches, const Settings& settings = {}) {
  const auto has = [&](const char* setting) {
    return std::ranges::find(settings, setting) != settings.end();
  };
  const int data_ranks =
      world / (has(kTwoShare) ? 2 : 1) / (has(kTwoOfASequence) ? 2 : 1);
  return resolve_config(
      testing::small_config(
          {"lora.rank=4",
           "lora.alpha=8",
           fmt::format("training.steps={}", kLoraSteps),
           fmt::format(
               "training.local_batch_size={}",
               kLoraBatch / (data_ranks * microbatches)),
           fmt::format("training.global_batch_size={}", kLoraBatch),
           "optimizer.name=sgd"},
          settings),
      world);
}

std::int64_t nbytes_of(
    const std::vector<MemoryRow>& rows,
    const std::string& role) {
  for (const MemoryRow& row : rows) {
    if (row.role == role) {
      return row.nbytes;
    }
  }
  return 0;
}

struct AdapterRun {
  std::vector<double> losses = std::vector<double>(kLoraSteps);
  std::map<std::string, std::vector<float>> adapters;  ///< by peft's names
};

std::map<std::string, std::vector<float>> read_floats(const fs::path& file) {
  std::map<std::string, std::vector<float>> found;
  const SafetensorsReader saved(file);
  for (const SafetensorsEntry& entry : saved.entries()) {
    std::vector<float> values(entry.nbytes() / sizeof(float));
    saved.read(entry, 0, std::as_writable_bytes(std::span(values)));
    found[entry.name] = std::move(values);
  }
  return found;
}

AdapterRun train_adapters(
    int world,
    int microbatches,
    const Settings& settings = {},
    bool drops_main = false) {
  const Config config = adapter_config(world, microbatches, settings);
  const TempFolder folder;
  AdapterRun result;
  std::mutex mutex;
  run_ranks(world, [&](RankContext& context) {
    const models::ModelConfig shape = model_config(config);
    const auto mesh = context.mesh(mesh_axes(config.parallelism));
    data::Loader loader = open_train_loader(run_options(config, shape).data);
    Batches batches(run_options(config, shape).batches, mesh, loader);
    TrainState state = make_train_state(config, shape, mesh, microbatches);
    if (drops_main) {
      keep_float8_alone(frozen_groups(*state.runtime));
      // The remaining main weights belong to the adapters.
      EXPECT_LT(nbytes_of(memory_rows(state), "main weights"), kSmallNbytes);
    }
    Microbatches steps(
        state.model,
        state.runtime,
        mesh,
        batches,
        {.as_graph = config.cuda_graph.whole_step(),
         .samples = state.lora->samples()});
    for (int step = 0; step < kLoraSteps; ++step) {
      batches.load_next();
      const at::Tensor loss = steps.forward_backward();
      state.optimizer->step(0.5);
      state.optimizer->zero_grad();
      state.runtime->finish_step();
      const std::lock_guard lock(mutex);
      result.losses[static_cast<std::size_t>(step)] +=
          loss.item<double>() / world;
    }
    save_adapter(
        peft_config_text(
            lora_config(config.lora),
            config.model.init_from,
            shape),
        shape,
        state.runtime->groups(),
        folder.path());
  });
  result.adapters = read_floats(folder / models::kPeftWeights);
  return result;
}

void expect_same(const AdapterRun& run, const AdapterRun& expected) {
  for (int step = 0; step < kLoraSteps; ++step) {
    EXPECT_NEAR(run.losses[step], expected.losses[step], kLoraTolerance);
  }
  ASSERT_EQ(run.adapters.size(), expected.adapters.size());
  for (const auto& [name, values] : expected.adapters) {
    const auto& found = run.adapters.at(name);
    ASSERT_EQ(found.size(), values.size()) << name;
    double most = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      most =
          std::max(most, std::abs(static_cast<double>(found[i]) - values[i]));
    }
    EXPECT_LT(most, kLoraTolerance) << name;
  }
}

TEST(Adapters, TrainTheSameOnAnyGridOfRanks) {
  const Settings dropped{"lora.dropout=0.3"};
  const AdapterRun plain = train_adapters(1, 1);
  const AdapterRun expected = train_adapters(1, 1, dropped);
  EXPECT_GT(std::abs(plain.losses[2] - expected.losses[2]), kLoraTolerance);
  // All layers of both blocks, A and B.
  EXPECT_EQ(expected.adapters.size(), 2U * 7 * 2);
  const auto expect = [&](int world, int microbatches, Settings settings) {
    SCOPED_TRACE(fmt::format(
        "{} ranks x {}, {}",
        world,
        microbatches,
        fmt::join(settings, " ")));
    settings.insert(settings.end(), dropped.begin(), dropped.end());
    expect_same(train_adapters(world, microbatches, settings), expected);
  };
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    expect(2, 3, {fmt::format("parallelism.strategy={}", strategy)});
  }
  expect(4, 1, {"parallelism.data_parallel_replicate_degree=2"});
  expect(1, 3, {});
  for (const char* mode : {"full", "selective"}) {
    expect(2, 1, {fmt::format("activation_checkpoint.mode={}", mode)});
  }
  expect(
      2,
      1,
      {"activation_checkpoint.mode=full",
       "activation_checkpoint.save=attention"});
  expect_same(
      train_adapters(
          2,
          1,
          {"activation_checkpoint.mode=full",
           "activation_checkpoint.mlp_chunk_tokens=3"}),
      plain);
  expect(2, 1, {"diagnostics.strict=true", "diagnostics.poison=true"});
  expect(2, 3, {kTwoShare});
  expect(4, 1, {kTwoShare, "activation_checkpoint.mode=full"});
  expect(2, 1, {kTwoShare, "parallelism.tensor_parallel_comm=copies"});
  expect(2, 3, {kTwoOfASequence});
  expect(
      2,
      1,
      {kTwoOfASequence,
       "parallelism.context_parallel_method=a2a+all_gather",
       "parallelism.context_parallel_a2a_degree=1"});
  expect(4, 1, {kTwoOfASequence, kTwoShare, "activation_checkpoint.mode=full"});
  for (const char* impl : {"unit", "full_iteration"}) {
    expect(
        1,
        2,
        {fmt::format("cuda_graph.impl={}", impl),
         "cuda_graph.warmup_steps=1",
         "cuda_graph.on_miss=error",
         "debug.emulate_graphs=true"});
  }
}

// B is trained at another rate than A, as in LoRA+, and A by another algorithm
// in one layer.
TEST(Adapters, ParameterGroupsTrainTheSameOnAnyGridOfRanks) {
  const Settings groups{
      "optimizer.param_groups=[{pattern = 'q_proj.*lora_A', name = 'adamw', "
      "eps = 1}, {pattern = 'lora_B', lr_mult = 64}]"};
  const AdapterRun plain = train_adapters(1, 1);
  const AdapterRun expected = train_adapters(1, 1, groups);
  EXPECT_GT(std::abs(plain.losses[2] - expected.losses[2]), kLoraTolerance);
  const auto expect = [&](int world, Settings settings) {
    SCOPED_TRACE(fmt::format("{} ranks, {}", world, fmt::join(settings, " ")));
    settings.insert(settings.end(), groups.begin(), groups.end());
    expect_same(train_adapters(world, 1, settings), expected);
  };
  for (const char* strategy : {"zero0", "zero3"}) {
    expect(2, {fmt::format("parallelism.strategy={}", strategy)});
  }
  expect(4, {"parallelism.data_parallel_replicate_degree=2"});
  expect(2, {kTwoShare});
  expect(
      1,
      {"cuda_graph.impl=full_iteration",
       "cuda_graph.warmup_steps=1",
       "cuda_graph.on_miss=error",
       "debug.emulate_graphs=true"});
}

TEST(Adapters, OfAttentionTrainBesideExperts) {
  const Settings settings{
      "model.family=qwen3_moe",
      "model.num_experts=4",
      "model.moe_ffn_dim=16",
      "lora.targets=q_proj,v_proj"};
  const AdapterRun expected = train_adapters(1, 1, settings);
  EXPECT_EQ(expected.adapters.size(), 2U * 2 * 2);
  Settings divided = settings;
  divided.emplace_back("parallelism.expert_parallel_degree=2");
  expect_same(train_adapters(2, 1, divided), expected);
  Settings sequences = divided;
  sequences.emplace_back(kTwoOfASequence);
  expect_same(train_adapters(2, 1, sequences), expected);
  Settings cut = divided;
  cut.emplace_back("parallelism.expert_tensor_parallel_degree=2");
  expect_same(train_adapters(4, 1, cut), expected);
  divided.emplace_back(kTwoShare);
  expect_same(train_adapters(4, 1, divided), expected);
}

// Phi-3's files have one matrix for q, k and v, and peft one adapter.
TEST(Adapters, OfOneModuleInFilesShareA) {
  const Settings settings{
      "model.family=phi3",
      "lora.targets=qkv_proj,gate_up_proj"};
  const AdapterRun run = train_adapters(1, 1, settings);
  EXPECT_EQ(run.adapters.size(), 2U * 2 * 2);
  const std::string qkv =
      "base_model.model.model.layers.1.self_attn.qkv_proj.lora_";
  EXPECT_EQ(run.adapters.at(qkv + "A.weight").size(), 4U * 32);
  EXPECT_EQ(run.adapters.at(qkv + "B.weight").size(), (32U + 2 * 16) * 4);
  expect_same(train_adapters(2, 1, settings), run);
  Settings shared = settings;
  shared.emplace_back(kTwoShare);
  expect_same(train_adapters(2, 1, shared), run);
}

TEST(Adapters, OfABaseInFp8NeedNoOtherWeightsOfIt) {
  const Settings wide{
      "precision.compute=bfloat16",
      "model.dim=64",
      "model.ffn_dim=128",
      "lora.dropout=0.1"};
  const AdapterRun plain = train_adapters(1, 1, wide);
  for (const char* recipe : {"rowwise", "tensorwise"}) {
    Settings settings = wide;
    settings.push_back(fmt::format("float8.recipe={}", recipe));
    for (const auto& [world, strategy] :
         {std::pair{1, "zero3"},
          std::pair{2, "zero2"},
          std::pair{2, "zero3"}}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks of {}", recipe, world, strategy));
      Settings divided = settings;
      divided.push_back(fmt::format("parallelism.strategy={}", strategy));
      const AdapterRun kept = train_adapters(world, 2, divided);
      const AdapterRun dropped =
          train_adapters(world, 2, divided, /*drops_main=*/true);
      EXPECT_EQ(dropped.losses, kept.losses);
      EXPECT_EQ(dropped.adapters, kept.adapters);
      // E4M3 has three bits after the point.
      EXPECT_NEAR(kept.losses[2], plain.losses[2], 0.05);
    }
  }
}

TEST(Adapters, AloneHaveGradientsAndOptimizerState) {
  for (const char* strategy : {"zero0", "zero3"}) {
    const Config config = adapter_config(
        2,
        1,
        {"optimizer.name=adamw",
         fmt::format("parallelism.strategy={}", strategy),
         // The shapes need no padding between parameters.
         "model.dim=64"});
    const models::ModelConfig shape = model_config(config);
    const std::int64_t shards =
        config.parallelism.strategy.name() == "zero3" ? 2 : 1;
    const std::int64_t trained = num_trainable_parameters(config.lora, shape);
    run_ranks(2, [&](RankContext& context) {
      const auto mesh = context.mesh(mesh_axes(config.parallelism));
      const TrainState state = make_train_state(config, shape, mesh, 1);
      const auto rows = memory_rows(state);
      const std::int64_t each = trained / shards * 4;
      EXPECT_EQ(nbytes_of(rows, "gradients"), each) << strategy;
      EXPECT_EQ(nbytes_of(rows, "optimizer state"), 2 * each) << strategy;
      for (const auto& unit : state.runtime->units()) {
        std::int64_t adapters = 0;
        for (const auto& group : unit->groups()) {
          if (group->trainable()) {
            adapters += group->layout().numel();
          }
        }
        // Slots of gradients and what is reduced; none for the embedding.
        EXPECT_EQ(unit->spec(kNoUnit, {}).grad_nbytes, adapters * 4)
            << unit->name();
      }
    });
  }
}

class LoraTrainerTest : public ::testing::Test {
 protected:
  LoraTrainerTest() {
    data::write_byte_corpus(
        folder_ / "corpus",
        {testing::learnable_text(300)},
        0.2);
  }

  fs::path run(const std::string& name) const { return folder_ / name; }

  void train(
      const std::string& name,
      const Settings& settings,
      bool resume = false,
      const std::string& device = "cpu") const {
    const std::string toml = fmt::format(
        R"(
[run]
output_dir = "{}"
seed = 1
[data]
train = "{}"
[training]
steps = 8
seq_len = 32
local_batch_size = 4
[optimizer]
lr = 1e-2
[lr_scheduler]
name = "constant"
[precision]
compute = "float32"
[checkpoint]
interval = 4
async = false
[metrics]
log_freq = 4
)",
        run(name).string(),
        (folder_ / "corpus").string());
    testing::train_printed(
        parse_config(toml, "test.toml", settings),
        resume,
        device);
  }

  /// A Hugging Face folder to start from.
  fs::path base() const {
    train(
        "base",
        {"model.dim=32",
         "model.layers=2",
         "model.heads=4",
         "model.kv_heads=2",
         "model.ffn_dim=64",
         "model.vocab_size=257",
         "optimizer.lr=0.003"});
    const fs::path to = run("base_hf");
    export_hf({.run = run("base"), .to = to});
    return to;
  }

  static Settings with_adapters(const fs::path& base, Settings more = {}) {
    more.insert(
        more.end(),
        {"model.init_from=" + base.string(),
         "lora.rank=4",
         "lora.dropout=0.1",
         "lora.exclude=*.layers.0.mlp.*"});
    return more;
  }

  double loss_of(const fs::path& model, const char* dtype = "auto") const {
    return evaluate({.model = model,
                     .data = (folder_ / "corpus").string(),
                     .seq_len = 32,
                     .device = "cpu",
                     .dtype = dtype})
        .metrics.loss;
  }

  double last_validation(const std::string& name) const {
    std::ifstream file(run(name) / "metrics.jsonl");
    double found = 0;
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      found = row.value("validation_loss", found);
    }
    return found;
  }

  static std::string bytes_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  TempFolder folder_;
};

TEST_F(LoraTrainerTest, ResumesBitwiseFromCheckpointsOfAdaptersAlone) {
  const fs::path hf = base();
  train("whole", with_adapters(hf));
  train("parts", with_adapters(hf, {"training.steps=4"}));
  train("parts", with_adapters(hf), /*resume=*/true);
  const auto weights = [&](const char* name) {
    return bytes_of(run(name) / models::kPeftWeights);
  };
  EXPECT_FALSE(weights("whole").empty());
  EXPECT_EQ(weights("parts"), weights("whole"));
  const Manifest manifest =
      read_manifest(step_folder(run("whole") / "checkpoints", 8));
  for (const auto& [role, tensors] : manifest.tensors) {
    // Layers of attention, and the layers of one MLP.
    EXPECT_EQ(tensors.size(), (2U * 4 + 3) * 2) << role;
    for (const auto& [name, tensor] : tensors) {
      EXPECT_TRUE(models::is_adapter_parameter(name)) << name;
    }
  }
  EXPECT_FALSE(fs::exists(run("whole") / "model.safetensors"));
}

TEST_F(LoraTrainerTest, ResumesOnNoOtherBase) {
  const fs::path hf = base();
  train("run", with_adapters(hf, {"training.steps=4"}));
  // One bit of one weight.
  std::fstream file(
      hf / "model.safetensors",
      std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-2, std::ios::end);
  file.put('\x11');
  file.close();
  EXPECT_THAT(
      message_of([&] { train("run", with_adapters(hf), /*resume=*/true); }),
      AllOf(
          HasSubstr("model.init_from: expected the base model"),
          HasSubstr("set the directory that the run started from")));
  EXPECT_THAT(
      message_of([&] { loss_of(run("run") / "checkpoints" / "step-4"); }),
      HasSubstr("expected the base model of the adapters"));
}

TEST_F(LoraTrainerTest, LeavesWhatEvaluatesExportsAndGoesOn) {
  const fs::path hf = base();
  train(
      "run",
      with_adapters(
          hf,
          {"validation.freq=8",
           "validation.sequences=-1",
           "data.validation=" + (folder_ / "corpus").string()}));
  const double loss = last_validation("run");
  EXPECT_LT(loss, loss_of(hf) - 0.01);
  EXPECT_NEAR(loss_of(run("run")), loss, kLoraTolerance);
  EXPECT_NEAR(loss_of(run("run") / "checkpoints"), loss, kLoraTolerance);

  EXPECT_THAT(
      export_hf({.run = run("run"), .to = run("adapter")}),
      HasSubstr("the adapter of step 8"));
  EXPECT_EQ(
      bytes_of(run("adapter") / models::kPeftWeights),
      bytes_of(run("run") / models::kPeftWeights));
  EXPECT_EQ(
      bytes_of(run("adapter") / models::kPeftConfig),
      bytes_of(run("run") / models::kPeftConfig));
  EXPECT_THAT(
      export_hf({.run = run("run"), .to = run("merged"), .merge = true}),
      HasSubstr("the merged weights of step 8"));
  EXPECT_NEAR(loss_of(run("merged")), loss, kLoraTolerance);
  const double rounded = loss_of(run("merged"), "bfloat16");
  EXPECT_NE(rounded, loss_of(run("merged"), "float32"));
  EXPECT_NEAR(rounded, loss, 0.02 * loss);
  const GenerateOptions prompt{
      .run = run("run"),
      .prompt = "the quick",
      .max_new_tokens = 12,
      .temperature = 0,
      .device = "cpu",
      .corpus = (folder_ / "corpus").string()};
  GenerateOptions merged = prompt;
  merged.run = run("merged");
  EXPECT_EQ(generate_text(prompt), generate_text(merged));

  // A step with a learning rate of nothing keeps the adapter.
  const Settings onward{
      "lora.init_from_adapter=" + run("adapter").string(),
      "training.steps=1",
      "optimizer.lr=0"};
  train("onward", with_adapters(hf, onward));
  EXPECT_EQ(
      bytes_of(run("onward") / models::kPeftWeights),
      bytes_of(run("run") / models::kPeftWeights));
  const auto refusal = [&](const std::string& setting) {
    Settings settings = with_adapters(hf, onward);
    settings.push_back(setting);
    return message_of([&] { train("refused", settings); });
  };
  EXPECT_THAT(refusal("lora.rank=8"), HasSubstr("expected lora.rank = 4"));
  EXPECT_THAT(refusal("lora.alpha=8"), HasSubstr("expected lora.alpha = 16"));
  EXPECT_THAT(
      refusal("lora.exclude="),
      AllOf(HasSubstr("the adapter lacks"), HasSubstr("lora.targets")));
  EXPECT_THAT(
      refusal("lora.targets=q_proj"),
      HasSubstr("has, and lora.targets does not name"));
  const fs::path described = run("adapter") / models::kPeftConfig;
  for (const auto& [key, value] :
       {std::pair<std::string, nlohmann::json>{"use_dora", true},
        {"rank_pattern", {{"q_proj", 8}}},
        {"bias", "all"}}) {
    auto json = nlohmann::json::parse(bytes_of(described));
    json[key] = value;
    std::ofstream(described) << json;
    EXPECT_THAT(
        refusal("training.steps=1"),
        AllOf(HasSubstr(key), HasSubstr("not supported")));
    json.erase(key);
    std::ofstream(described) << json;
  }
}

TEST_F(LoraTrainerTest, TrainsOnAGpuAsOnTheCpu) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no GPU, or a build without CUDA";
  }
  const fs::path hf = base();
  const auto with = [&](Settings settings) {
    settings.insert(settings.end(), {"optimizer.name=sgd", "optimizer.lr=0.5"});
    return with_adapters(hf, settings);
  };
  train("cpu", with({}));
  const auto expected = read_floats(run("cpu") / models::kPeftWeights);
  const std::vector<Settings> ways{
      {},
      {"activation_checkpoint.mode=full"},
      {"cuda_graph.impl=unit", "cuda_graph.on_miss=error"},
      {"cuda_graph.impl=full_iteration", "cuda_graph.on_miss=error"}};
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const std::string name = fmt::format("gpu{}", i);
    train(name, with(ways[i]), /*resume=*/false, "cuda");
    for (const auto& [key, values] :
         read_floats(run(name) / models::kPeftWeights)) {
      const auto& want = expected.at(key);
      for (std::size_t k = 0; k < values.size(); ++k) {
        ASSERT_NEAR(values[k], want[k], 1e-4) << name << " " << key;
      }
    }
  }
}

TEST(AdapterTargets, AreRefusedByNameWhereThereAreNone) {
  const auto refusal = [](const Settings& settings) {
    return message_of([&] {
      const Config config = adapter_config(1, 1, settings);
      models::Llama model(model_config(config));
      models::add_lora(*model, lora_config(config.lora));
    });
  };
  EXPECT_THAT(
      refusal({"lora.targets=q_proj,query"}),
      AllOf(
          HasSubstr("lora.targets: expected all-linear or some of down_proj"),
          HasSubstr("got 'query'")));
  EXPECT_THAT(
      refusal({"lora.targets=lm_head"}),
      HasSubstr("an adapter of lm_head is not supported"));
  EXPECT_THAT(
      refusal({"lora.exclude=*"}),
      HasSubstr("lora.exclude leaves none of the layers"));
  EXPECT_THAT(
      refusal({"model.family=phi3", "lora.targets=q_proj"}),
      HasSubstr("qkv_proj"));
  for (const auto& [family, target] :
       {std::pair{"mixtral", "w1"},
        std::pair{"qwen3_moe", "gate_proj"},
        std::pair{"gpt_oss", "router"},
        std::pair{"gpt_oss", "gate_up_proj"},
        std::pair{"mixtral", "all-linear"}}) {
    EXPECT_THAT(
        refusal(
            {fmt::format("model.family={}", family),
             "model.num_experts=4",
             fmt::format("lora.targets={}", target)}),
        HasSubstr("includes the experts or their router, and adapters do not "
                  "support them"));
  }
}

// The keys of peft 0.21. A key of a later version may change results.
TEST(AdapterFolder, RefusesKeysThatChangeResults) {
  const TempFolder folder;
  const auto refusal = [&](const std::string& more) {
    auto json = nlohmann::json::parse(R"({
      "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none",
      "init_lora_weights": true, "use_rslora": false, "use_dora": false,
      "rank_pattern": {}, "loftq_config": {}, "alora_invocation_tokens": null,
      "megatron_core": "megatron.core", "qalora_group_size": 16,
      "peft_version": "0.21.2", "inference_mode": true, "lora_dropout": 0.1,
      "target_modules": ["q_proj"], "layers_to_transform": [0]})");
    json.update(nlohmann::json::parse(more));
    const auto path = folder.write("adapter_config.json", json.dump());
    return message_of(
        [&] { models::check_peft_json(path, {.rank = 4, .alpha = 8}); });
  };
  for (const char* fine :
       {"{}",
        R"({"init_lora_weights": false})",
        R"({"init_lora_weights": "gaussian"})",
        R"({"init_lora_weights": "orthogonal"})",
        R"({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}})"}) {
    EXPECT_EQ(refusal(fine), "no error") << fine;
  }
  for (const char* init :
       {"pissa",
        "pissa_niter_4",
        "olora",
        "corda",
        "loftq",
        "lora_ga",
        "mica"}) {
    EXPECT_THAT(
        refusal(fmt::format(R"({{"init_lora_weights": "{}"}})", init)),
        HasSubstr(fmt::format("'init_lora_weights' = \"{}\" is not", init)));
  }
  for (const auto& [key, value] :
       {std::pair{"alora_invocation_tokens", "[5, 6]"},
        {"alpha_pattern", R"({"q_proj": 2})"},
        {"arrow_config", R"({"top_k": 2})"},
        {"corda_config", R"({"rank": 2})"},
        {"fan_in_fan_out", "true"},
        {"kasa_config", R"({"beta": 1})"},
        {"layer_replication", "[[0, 2]]"},
        {"loftq_config", R"({"loftq_bits": 4})"},
        {"lora_bias", "true"},
        {"lora_ga_config", R"({"direction": "x"})"},
        {"megatron_config", R"({"tp": 2})"},
        {"modules_to_save", R"(["lm_head"])"},
        {"monteclora_config", R"({"samples": 2})"},
        {"rank_pattern", R"({"q_proj": 2})"},
        {"target_parameters", R"(["experts.down_proj"])"},
        {"trainable_token_indices", "[3]"},
        {"use_bdlora", R"({"blocks": 2})"},
        {"use_dora", "true"},
        {"use_qalora", "true"},
        {"velora_config", R"({"rank": 2})"},
        {"of_a_later_version", "1"}}) {
    EXPECT_THAT(
        refusal(fmt::format(R"({{"{}": {}}})", key, value)),
        HasSubstr(fmt::format("'{}' = ", key)));
  }
}

TEST(AdapterConfig, RefusesWhatDoesNotFit) {
  const auto refusal = [](const Settings& settings) {
    return message_of([&] { adapter_config(1, 1, settings); });
  };
  EXPECT_THAT(
      refusal({"checkpoint.export_hf_at_end=true", "checkpoint.interval=1"}),
      HasSubstr("flatshard export --merge"));
  EXPECT_THAT(
      refusal({"parallelism.overlap_expert_parallel=true"}),
      HasSubstr("blocks in pieces are for runs that train all"));
  EXPECT_THAT(
      refusal({"moe.balance_rate=0.1"}),
      HasSubstr("the router's bias is frozen; set moe.balance_rate to 0"));
}

}  // namespace
}  // namespace flatshard
