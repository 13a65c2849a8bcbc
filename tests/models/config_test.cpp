#include "flatshard/models/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/init.h"

#include <fmt/format.h>

#include <fstream>

namespace flatshard::models {
namespace {

class HfConfig : public ::testing::Test {
 protected:
  std::filesystem::path write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  // Returns the message of the error that reading `text` gives.
  std::string message(const std::string& text, ErrorCode code) {
    try {
      from_hf_json(write(text));
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code);
      return e.message();
    }
    return "did not throw";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) /
      ("flatshard_config_" +
       std::string(
           ::testing::UnitTest::GetInstance()->current_test_info()->name()) +
       ".json");
};

// Returns the text with `extra` keys added; later keys win in this reader.
std::string llama_json(const std::string& extra = "") {
  return R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "head_dim": 64,
    "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
      "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
      "rope_type": "llama3"})" +
         extra + "}";
}

TEST_F(HfConfig, ReadsLlama32) {
  EXPECT_EQ(from_hf_json(write(llama_json())), preset("llama3_1b"));
}

TEST_F(HfConfig, InitializerRangeGivesTheFirstWeights) {
  EXPECT_EQ(from_hf_json(write(llama_json(""))).initializer_range, 0.02);
  ModelConfig config =
      from_hf_json(write(llama_json(R"(, "initializer_range": 0.5)")));
  EXPECT_EQ(config.initializer_range, 0.5);
  EXPECT_EQ(init_std(config), 0.5F);
  EXPECT_EQ(from_hf_json(write(to_hf_json(config, "float32"))), config);
  config.initializer_range = 0;
  EXPECT_THROW(config.validate(), Error);
}

TEST_F(HfConfig, ReadsThetaFromRopeParameters) {
  const ModelConfig config = from_hf_json(write(llama_json(
      R"(, "rope_scaling": null,
      "rope_parameters": {"rope_type": "default", "rope_theta": 7.0})")));
  EXPECT_EQ(config.rope_theta, 7.0);
  EXPECT_FALSE(config.rope_scaling.has_value());
}

std::string moe_json(const std::string& type, const std::string& extra) {
  return R"({"model_type": ")" + type + R"(",
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 257,
    "max_position_embeddings": 256, "num_experts_per_tok": 2)" +
         extra + "}";
}

TEST_F(HfConfig, ReadsExperts) {
  ModelConfig mixtral = preset("mixtral_tiny");
  mixtral.rope_theta = 1e6;  // its class' default
  EXPECT_EQ(
      from_hf_json(write(moe_json("mixtral", R"(, "num_local_experts": 4)"))),
      mixtral);
  ModelConfig qwen = preset("qwen3_moe_tiny");
  qwen.rope_theta = 10000;
  qwen.moe.dense_layers = 1;
  const std::string qwen_keys = R"(, "num_experts": 8, "head_dim": 32,
      "moe_intermediate_size": 48, "norm_topk_prob": true)";
  EXPECT_EQ(
      from_hf_json(write(
          moe_json("qwen3_moe", qwen_keys + R"(, "mlp_only_layers": [0])"))),
      qwen);
  const std::string version_5 = R"(, "num_local_experts": 8, "head_dim": 32,
      "moe_intermediate_size": 48, "norm_topk_prob": true,
      "mlp_only_layers": [0])";
  EXPECT_EQ(from_hf_json(write(moe_json("qwen3_moe", version_5))), qwen);
  for (const ModelConfig& config : {mixtral, qwen}) {
    EXPECT_EQ(from_hf_json(write(to_hf_json(config, "float32"))), config);
  }
  const std::string file = path_.string();
  EXPECT_EQ(
      message(
          moe_json("qwen3_moe", qwen_keys + R"(, "mlp_only_layers": [1])"),
          ErrorCode::config),
      file + ": expected mlp_only_layers to be the first layers, got [1]; it "
             "is not supported");
  EXPECT_EQ(
      message(
          moe_json(
              "mixtral",
              R"(, "num_local_experts": 4, "sliding_window": 4096)"),
          ErrorCode::config),
      file + ": expected sliding_window = null, got 4096; it is not supported");
  EXPECT_EQ(
      message(moe_json("deepseek_v3", ""), ErrorCode::config),
      file + ": model_type 'deepseek_v3' is not supported, because it has "
             "multi-head latent attention");
  EXPECT_THROW(to_hf_json({.family = "moe"}, "float32"), Error);
}

TEST_F(HfConfig, ErrorsNameFileAndKey) {
  const std::string file = path_.string();
  EXPECT_EQ(
      message(llama_json(R"(, "model_type": "gpt2")"), ErrorCode::config),
      file + ": expected model_type 'llama', 'qwen2', 'qwen3', 'mistral', "
             "'olmo2', 'phi3', 'gemma2', 'gemma3_text', 'mixtral', "
             "'qwen3_moe', 'gpt_oss', got 'gpt2'; it is not supported");
  EXPECT_EQ(
      message(
          llama_json(R"(, "architectures": ["MistralForCausalLM"])"),
          ErrorCode::config),
      file + ": expected the architecture LlamaForCausalLM, got "
             "MistralForCausalLM");
  // The model is the same without its head or with another one.
  for (const char* other : {"LlamaModel", "LlamaForSequenceClassification"}) {
    EXPECT_NO_THROW(from_hf_json(
        write(llama_json(fmt::format(R"(, "architectures": ["{}"])", other)))));
  }
  EXPECT_THAT(
      message(
          "version https://git-lfs.github.com/spec/v1\noid sha256:4d\n",
          ErrorCode::format),
      ::testing::HasSubstr("is a Git LFS pointer"));
  EXPECT_EQ(
      message(llama_json(R"(, "attention_dropout": 0.5)"), ErrorCode::config),
      file +
          ": expected attention_dropout = 0.0, got 0.5; it is not supported");
  EXPECT_EQ(
      message(llama_json(R"(, "hidden_act": "gelu")"), ErrorCode::config),
      file + ": expected hidden_act = \"silu\", got \"gelu\"; it is not "
             "supported");
  EXPECT_EQ(
      message(
          llama_json(R"(, "rope_scaling": {"rope_type": "yarn"})"),
          ErrorCode::format),
      file + ": rope_scaling: expected the key 'factor', found none");
  EXPECT_EQ(
      message(R"({"model_type": "llama"})", ErrorCode::format),
      file + ": expected the key 'hidden_size', found none");
  EXPECT_THAT(
      message(llama_json(R"(, "vocab_size": "x")"), ErrorCode::format),
      ::testing::HasSubstr("key 'vocab_size' has the value \"x\""));
  EXPECT_THAT(
      message("{", ErrorCode::format),
      ::testing::HasSubstr("expected JSON"));
  EXPECT_THAT(
      message("[]", ErrorCode::format),
      ::testing::HasSubstr("expected a JSON object, got array"));
}

TEST(ModelConfigErrors, MissingFileAndUnknownPreset) {
  try {
    from_hf_json("/nowhere/config.json");
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
  }
  try {
    preset("llama9");
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_THAT(
        e.message(),
        ::testing::StartsWith(
            "expected a model preset, one of llama3_1b, llama3_3b, "));
    EXPECT_THAT(e.message(), ::testing::EndsWith(", got 'llama9'"));
  }
}

TEST(ModelConfigErrors, FieldsAreNamed) {
  const auto message = [](ModelConfig config) {
    try {
      config.validate();
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("did not throw");
  };
  EXPECT_EQ(
      message({.layers = 0}),
      "model.layers: expected a positive number, got 0");
  EXPECT_EQ(
      message({.heads = 6, .kv_heads = 4}),
      "model.kv_heads: expected a divisor of heads 6, got 4");
  EXPECT_EQ(
      message({.dim = 10, .heads = 4, .kv_heads = 2}),
      "model.heads: expected a divisor of dim 10 (or set head_dim), got 4");
  EXPECT_EQ(
      message({.head_dim = 7}),
      "model.head_dim: expected an even number, got 7");
}

TEST(ModelConfigErrors, HeadsThatContextParallelRanksDoNotDivide) {
  ModelConfig config;
  config.heads = 24;
  config.kv_heads = 6;
  const auto message = [&](std::int64_t size, std::int64_t tensor_ranks) {
    try {
      check_context_parallel(config, size, tensor_ranks, "degree");
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::config);
      return e.message();
    }
    return std::string();
  };
  EXPECT_EQ(message(3, 1), "");
  EXPECT_EQ(message(12, 1), "");
  EXPECT_EQ(message(2, 3), "");
  EXPECT_EQ(
      message(5, 1),
      "degree = 5: expected a divisor of the 24 heads (model.heads); change "
      "one of them");
  EXPECT_EQ(
      message(8, 2),
      "degree = 8: expected a divisor of the 12 heads of a tensor-parallel "
      "rank (model.heads); change one of them");
  EXPECT_EQ(
      message(4, 1),
      "degree = 4: expected a divisor or a multiple of the 6 kv heads "
      "(model.kv_heads); change one of them");
}

// The published sizes.
TEST(Flops, ParameterCounts) {
  EXPECT_EQ(num_parameters(preset("llama3_1b")), 1235814400);
  EXPECT_EQ(num_parameters(preset("llama3_3b")), 3212749824);
  EXPECT_EQ(num_parameters(preset("llama3_8b")), 8030261248);
  EXPECT_EQ(num_parameters(preset("llama3_70b")), 70553706496);
  EXPECT_EQ(num_parameters(preset("llama3_405b")), 405853388800);
}

TEST(Flops, PerTokenOfLlama8b) {
  const ModelConfig config = preset("llama3_8b");
  EXPECT_NEAR(flops_per_token(config, 8192), 57.9e9, 0.05e9);
  EXPECT_NEAR(
      flops_per_token(config, 8192, FlopsConvention::causal),
      51.5e9,
      0.05e9);
}

TEST(HfNames, DifferInTheFinalNormOnly) {
  EXPECT_EQ(to_hf_name("lm_head.norm.weight"), "model.norm.weight");
  EXPECT_EQ(to_hf_name("lm_head.weight"), "lm_head.weight");
}

TEST(HfNames, EntriesThatChangeNothing) {
  for (const char* name :
       {"model.layers.3.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.cos_cached",
        "model.layers.0.attn.masked_bias",
        "model.layers.0.self_attn.k_scale",
        "score.weight",
        "v_head.summary.bias",
        "vision_tower.layers.0.weight"}) {
    EXPECT_TRUE(is_unneeded_hf_entry(name, 1)) << name;
  }
  // These change what a layer computes.
  for (const char* name :
       {"model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.9.mlp.up_proj.weight",
        "model.layers.0.attn.bias",
        "lm_head.bias"}) {
    EXPECT_FALSE(is_unneeded_hf_entry(name, 1)) << name;
  }
  EXPECT_TRUE(is_unneeded_hf_entry("model.layers.0.attn.bias", 4));
  EXPECT_EQ(layer_of_hf_entry("model.layers.12.x.weight"), 12);
  EXPECT_EQ(layer_of_hf_entry("model.norm.weight"), std::nullopt);
}

}  // namespace
}  // namespace flatshard::models
