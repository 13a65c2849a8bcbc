// Every family trains sharded, with recompute, and reloads from its files.
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/weight_stream.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/train_state.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_config.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

constexpr std::int64_t kFamilyVocab = 61;  // as small_config has it
constexpr std::int64_t kFamilySeq = 24;
constexpr std::int64_t kSequences = 4;  // of a step
constexpr int kFamilySteps = 4;

bool has_experts(const std::string& family) {
  return family == "mixtral" || family == "gpt_oss" || family.ends_with("moe");
}

Config family_config(
    const std::string& family,
    const std::vector<std::string>& overrides,
    int world) {
  testing::Settings own{
      "model.family=" + family,
      "model.dim=16",
      "model.head_dim=8",
      "model.ffn_dim=32",
      fmt::format("training.seq_len={}", kFamilySeq),
      fmt::format("training.local_batch_size={}", kSequences / world)};
  if (has_experts(family)) {
    own.insert(own.end(), {"model.num_experts=4", "model.experts_per_token=2"});
  }
  if (family.starts_with("gemma")) {
    own.emplace_back("model.sliding_window_pattern=2");
  }
  if (family.starts_with("gemma") || family == "mistral" || family == "phi3" ||
      family == "gpt_oss") {
    own.emplace_back("model.sliding_window=7");
  }
  return resolve_config(testing::small_config(own, overrides), world);
}

/// The results of a run of a few steps on the same sequences.
struct FamilyRun {
  std::vector<double> losses;                 ///< the mean over ranks
  std::map<std::string, at::Tensor> weights;  ///< of model.safetensors
  /// Tensors of a stream in bfloat16 on the last rank.
  std::map<std::string, at::Tensor> streamed;
};

class TrainFamilies : public ::testing::TestWithParam<std::string> {
 protected:
  FamilyRun train(int world, const std::vector<std::string>& overrides = {})
      const {
    const auto file =
        folder_ / fmt::format("{}", ++runs_) / "model.safetensors";
    std::filesystem::create_directories(file.parent_path());
    FamilyRun result;
    result.losses.assign(kFamilySteps, 0.0);
    std::mutex mutex;
    run_ranks(world, [&](RankContext& context) {
      const Config config = family_config(GetParam(), overrides, world);
      const models::ModelConfig shape = model_config(config);
      const auto mesh = context.mesh();
      TrainState state = make_train_state(config, shape, mesh, 1);
      const std::int64_t mine = kSequences / world;
      const at::Tensor tokens =
          at::randint(
              kFamilyVocab,
              {kSequences, kFamilySeq + 1},
              at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{5}),
              at::kLong)
              .narrow(0, mine * mesh->rank(), mine);
      for (int step = 0; step < kFamilySteps; ++step) {
        state.runtime->set_is_last_microbatch(true);
        const at::Tensor loss = state.model(
            tokens.narrow(1, 0, kFamilySeq).contiguous(),
            tokens.narrow(1, 1, kFamilySeq).contiguous());
        loss.backward();
        state.optimizer->step(1e-2);
        state.optimizer->zero_grad();
        const std::lock_guard lock(mutex);
        result.losses[static_cast<std::size_t>(step)] +=
            loss.item<double>() / world;
      }
      const auto groups = state.runtime->all_groups();
      save_weights(
          {groups.begin(), groups.end()},
          file,
          {},
          models::hf_entries_of(shape));
      WeightStream stream(
          {groups.begin(), groups.end()},
          {.dtype_of = dtype_of_weights(at::kBFloat16),
           .entries_of = models::hf_entries_of(shape)});
      while (const auto tensors = stream.next()) {
        for (const auto& [name, tensor] : *tensors) {
          if (context.rank == world - 1) {
            result.streamed[name] = tensor.clone();
          }
        }
      }
      // Another model loads them from that file.
      TrainState other = make_train_state(
          config,
          shape,
          context.mesh({{"dp", world}}, "other"),
          1);
      init_weights(
          file.parent_path(),
          other.runtime->all_groups(),
          {.entries_of = models::hf_entries_of(shape)});
      const at::NoGradGuard no_grad;
      const at::Tensor inputs = tokens.narrow(1, 0, kFamilySeq).contiguous();
      EXPECT_TRUE(at::equal(state.model(inputs), other.model(inputs)));
    });
    const SafetensorsReader reader(file);
    for (const SafetensorsEntry& entry : reader.entries()) {
      const at::Tensor values = at::empty(entry.shape, at::kFloat);
      reader.read(
          entry,
          0,
          {static_cast<std::byte*>(values.data_ptr()), values.nbytes()});
      result.weights[entry.name] = values;
    }
    EXPECT_EQ(result.streamed.size(), result.weights.size());
    for (const auto& [name, tensor] : result.streamed) {
      EXPECT_TRUE(tensor.equal(result.weights.at(name).to(at::kBFloat16)))
          << name;
    }
    return result;
  }

  const TempFolder folder_;
  mutable int runs_ = 0;
};

INSTANTIATE_TEST_SUITE_P(
    Families,
    TrainFamilies,
    ::testing::ValuesIn([] {
      std::vector<std::string> names;
      for (const std::string_view name : models::family_names()) {
        names.emplace_back(name);
      }
      return names;
    }()),
    [](const auto& info) { return info.param; });

TEST_P(TrainFamilies, TwoRanksLearnWhatOneDoes) {
  const FamilyRun one = train(1);
  EXPECT_LT(one.losses.back(), one.losses.front() - 0.1);
  for (const FamilyRun& other :
       {train(2), train(2, {"activation_checkpoint.mode=full"})}) {
    const double tolerance = testing::sum_tolerance(
        {.addends = kSequences * kFamilySeq,
         .in_a_row = testing::sums_of_steps(/*layers=*/2, kFamilySteps)});
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(other.losses[i], one.losses[i], tolerance) << i;
    }
    ASSERT_EQ(other.weights.size(), one.weights.size());
    for (const auto& [name, values] : one.weights) {
      // AdamW moves each element by about the learning rate, in whichever
      // direction a gradient near zero points: so few may differ by it.
      const at::Tensor apart = (other.weights.at(name) - values).abs();
      EXPECT_LT(apart.mean().item<double>(), 1e-4) << name;
    }
  }
}

TEST_P(TrainFamilies, GraphsAndFloat8Weights) {
  const FamilyRun plain = train(2);
  if (!has_experts(GetParam())) {
    const FamilyRun graphs = train(
        2,
        {"cuda_graph.impl=unit",
         "cuda_graph.warmup_steps=1",
         "cuda_graph.on_miss=error",
         "debug.emulate_graphs=true"});
    EXPECT_EQ(graphs.losses, plain.losses);
  }
  const FamilyRun float8 = train(
      2,
      {"precision.compute=bfloat16",
       "float8.recipe=rowwise",
       "float8.emulate=true"});
  for (std::size_t i = 0; i < plain.losses.size(); ++i) {
    EXPECT_NE(float8.losses[i], plain.losses[i]) << i;
    // Matmuls of values with 3 bits of mantissa, of a loss near ln(61).
    EXPECT_NEAR(float8.losses[i], plain.losses[i], 0.1) << i;
  }
}

models::ModelConfig with_keys(const std::string& keys) {
  return model_config(parse_config(
      "[data]\ntrain = \"random\"\n[model]\n" + keys,
      "test.toml"));
}

std::string key_refusal(const std::string& keys) {
  try {
    with_keys(keys);
  } catch (const Error& error) {
    return error.message();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

TEST(FamilyKeys, StretchRotations) {
  const models::ModelConfig yarn =
      with_keys("preset = \"qwen2_5_0_5b\"\nrope_scaling = \"yarn\"\n"
                "rope_factor = 4.0");
  ASSERT_TRUE(yarn.rope_scaling.has_value());
  EXPECT_EQ(yarn.rope_scaling->type, nn::RopeType::yarn);
  EXPECT_EQ(yarn.rope_scaling->original_max_positions, 32768);
  EXPECT_EQ(
      yarn.rope_scaling->attention_factor,
      nn::yarn_attention_factor(4.0));
  EXPECT_EQ(yarn.max_seq_len, 4 * 32768);
  const models::ModelConfig shorter =
      with_keys("preset = \"qwen2_5_0_5b\"\nrope_scaling = \"dynamic\"\n"
                "rope_factor = 2.0\nrope_original_seq_len = 4096\n"
                "max_seq_len = 6000");
  EXPECT_EQ(shorter.rope_scaling->original_max_positions, 4096);
  EXPECT_EQ(shorter.max_seq_len, 6000);
  EXPECT_FALSE(with_keys("preset = \"llama3_1b\"\nrope_scaling = \"none\"")
                   .rope_scaling.has_value());
  EXPECT_THAT(
      key_refusal("preset = \"llama3_1b\"\nrope_scaling = \"yarn\""),
      ::testing::HasSubstr("model.rope_factor"));
  EXPECT_THAT(
      key_refusal("preset = \"llama3_1b\"\nrope_factor = 2.0"),
      ::testing::HasSubstr("model.rope_scaling"));
  EXPECT_THAT(
      key_refusal("preset = \"olmo2_1b\"\nrope_scaling = \"yarn\"\n"
                  "rope_factor = 2.0"),
      ::testing::HasSubstr("models of the family olmo2"));
}

TEST(FamilyKeys, ReplaceWhatAFamilyLeavesOpen) {
  const models::ModelConfig gemma =
      with_keys("preset = \"gemma3_1b\"\nsliding_window = 128\n"
                "sliding_window_pattern = 3\nlocal_rope_theta = 5000.0\n"
                "query_pre_attn_scalar = 100.0\nfinal_soft_cap = 20.0");
  const models::AttentionOptions& attention = gemma.block.attention;
  EXPECT_EQ(attention.window, 128);
  EXPECT_EQ(attention.window_pattern, (std::vector<bool>{true, true, false}));
  EXPECT_EQ(gemma.local_rope_theta, 5000.0);
  EXPECT_EQ(attention.query_pre_attn_scalar, 100.0);
  EXPECT_EQ(gemma.final_soft_cap, 20.0);
  EXPECT_EQ(
      with_keys("preset = \"gemma2_2b\"\nattention_soft_cap = 0.0")
          .block.attention.soft_cap,
      0.0);
  const models::ModelConfig biased = with_keys(
      "preset = \"llama3_1b\"\nattention_bias = true\nmlp_bias = true");
  EXPECT_TRUE(biased.block.attention.output_bias && biased.block.mlp_bias);
  EXPECT_THAT(
      key_refusal("preset = \"llama3_1b\"\nsliding_window = 64"),
      ::testing::HasSubstr("model.sliding_window: all models of the family "
                           "llama"));
  EXPECT_THAT(
      key_refusal("preset = \"gemma2_2b\"\n[activation_checkpoint]\n"
                  "mode = \"full\"\nsave = [\"attention\"]"),
      ::testing::HasSubstr("no fused kernel computes attention with soft caps "
                           "(model.attention_soft_cap = 50)"));
  EXPECT_THAT(
      key_refusal("preset = \"olmo2_1b\"\nqk_norm = false"),
      ::testing::HasSubstr("model.qk_norm"));
  EXPECT_TRUE(
      with_keys("preset = \"olmo2_1b\"\nqk_norm = true")
          .block.attention.qk_norm == models::QkNorm::projection);
}

}  // namespace
}  // namespace flatshard
