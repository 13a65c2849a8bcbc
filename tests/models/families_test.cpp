// Numbers of published models: config.json files as they were published, and
// how many parameters their weights have.
#include "flatshard/core/error.h"
#include "flatshard/models/config.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/temp_folder.h"

namespace flatshard::models {
namespace {

using ::testing::HasSubstr;

class FamilyConfigs : public ::testing::Test {
 protected:
  ModelConfig read(const std::string& json) const {
    folder_.write("config.json", json);
    return from_hf_json(folder_ / "config.json");
  }
  std::string refusal(const std::string& json) const {
    try {
      read(json);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    ADD_FAILURE() << "expected an error";
    return {};
  }
  TempFolder folder_;
};

TEST_F(FamilyConfigs, PresetsSurviveTheirConfigJson) {
  for (const std::string_view name : preset_names()) {
    SCOPED_TRACE(name);
    const ModelConfig config = preset(name);
    EXPECT_EQ(read(to_hf_json(config, "bfloat16")), config);
  }
}

TEST_F(FamilyConfigs, Qwen25) {
  EXPECT_EQ(
      read(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 131072,
    "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 152064})"),
      preset("qwen2_5_7b"));
}

TEST_F(FamilyConfigs, Qwen3) {
  EXPECT_EQ(
      read(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})"),
      preset("qwen3_0_6b"));
}

TEST_F(FamilyConfigs, Mistral) {
  const std::string version_1 = R"({
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_cache": true, "vocab_size": 32000)";
  const ModelConfig expected = preset("mistral_7b_v0_1");
  EXPECT_EQ(read(version_1 + R"(, "sliding_window": 4096})"), expected);
  // transformers' default.
  EXPECT_EQ(read(version_1 + "}"), expected);
  EXPECT_EQ(
      read(version_1 + R"(, "sliding_window": null})").block.attention.window,
      0);
}

TEST_F(FamilyConfigs, Olmo2) {
  EXPECT_EQ(
      read(R"({
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "olmo2", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 500000, "tie_word_embeddings": false,
    "torch_dtype": "float32", "use_cache": false, "vocab_size": 100352})"),
      preset("olmo2_7b"));
}

TEST_F(FamilyConfigs, Phi3) {
  const std::string mini = R"({
    "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
    "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "attention_bias": false,
    "vocab_size": 32064)";
  EXPECT_EQ(
      read(mini + R"(, "max_position_embeddings": 4096,
    "rope_scaling": null, "sliding_window": 2047})"),
      preset("phi3_mini"));
  std::string factors = "[1.0";
  for (int i = 1; i < 48; ++i) {
    factors += ", 2.5";
  }
  factors += "]";
  const ModelConfig longer = read(
      mini + R"(, "max_position_embeddings": 131072, "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "long_factor": )" +
      factors + R"(, "short_factor": )" + factors + "}}");
  ASSERT_TRUE(longer.rope_scaling.has_value());
  EXPECT_EQ(longer.rope_scaling->factor, 32.0);
  // sqrt(1 + ln(32) / ln(4096))
  EXPECT_NEAR(longer.rope_scaling->attention_factor, 1.1902380714, 1e-9);
  EXPECT_EQ(read(to_hf_json(longer, "bfloat16")), longer);
  // A model that transformers would not read is not written.
  EXPECT_THAT(
      refusal(mini + R"(, "rope_scaling": {"rope_type": "linear",
              "factor": 2.0}})"),
      HasSubstr("model.rope_scaling: models of the family phi3"));
}

TEST_F(FamilyConfigs, Gemma3) {
  const std::string text = R"({
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": null,
    "bos_token_id": 2, "eos_token_id": [1, 106],
    "final_logit_softcapping": null, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": null,
    "rope_theta": 1000000, "sliding_window": 512,
    "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144)";
  const ModelConfig config = read(text + R"(, "sliding_window_pattern": 6})");
  EXPECT_EQ(config, preset("gemma3_1b"));
  EXPECT_TRUE(config.block.attention.has_window(4));
  EXPECT_FALSE(config.block.attention.has_window(5));
  EXPECT_TRUE(config.block.attention.has_window(6));
  EXPECT_THAT(
      refusal(text + R"(, "attn_logit_softcapping": 50.0})"),
      HasSubstr("attn_logit_softcapping"));
  EXPECT_THAT(
      refusal(text + R"(, "hidden_activation": "gelu"})"),
      HasSubstr("hidden_activation"));
  EXPECT_THAT(
      refusal(R"({"model_type": "gemma3"})"),
      HasSubstr("use the text model, gemma3_text"));
}

TEST_F(FamilyConfigs, GptOss) {
  const std::string text = R"({
    "architectures": ["GptOssForCausalLM"], "attention_bias": true,
    "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": [
      "sliding_attention", "full_attention", "sliding_attention",
      "full_attention", "sliding_attention", "full_attention",
      "sliding_attention", "full_attention", "sliding_attention",
      "full_attention", "sliding_attention", "full_attention",
      "sliding_attention", "full_attention", "sliding_attention",
      "full_attention", "sliding_attention", "full_attention",
      "sliding_attention", "full_attention", "sliding_attention",
      "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": false,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088)";
  const std::string quantized = R"(, "quantization_config": {
    "modules_to_not_convert": ["model.layers.*.self_attn",
      "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4"})";
  const std::string rope = R"(, "rope_scaling": {"beta_fast": 32.0,
    "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": false,
    "original_max_position_embeddings": 4096})";
  const ModelConfig config =
      read(text + quantized + rope + R"(, "swiglu_limit": 7.0})");
  EXPECT_EQ(config, preset("gpt_oss_20b"));
  EXPECT_TRUE(config.block.attention.has_window(0));
  EXPECT_FALSE(config.block.attention.has_window(1));
  // transformers' defaults.
  EXPECT_EQ(read(text + "}"), config);
  const ModelConfig unscaled = read(text + R"(, "rope_scaling": null})");
  EXPECT_FALSE(unscaled.rope_scaling.has_value());
  EXPECT_EQ(read(to_hf_json(unscaled, "bfloat16")), unscaled);
  EXPECT_THAT(
      refusal(text + R"(, "swiglu_limit": 5.0})"),
      HasSubstr("expected swiglu_limit = 7.0"));
  EXPECT_THAT(
      refusal(
          text +
          R"(, "quantization_config": {"quant_method": "bitsandbytes"}})"),
      HasSubstr("expected quant_method = \"mxfp4\""));
}

TEST_F(FamilyConfigs, Gemma2) {
  EXPECT_EQ(
      read(R"({
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608,
    "initializer_range": 0.02, "intermediate_size": 36864,
    "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 32, "num_hidden_layers": 46,
    "num_key_value_heads": 16, "pad_token_id": 0,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 256000})"),
      preset("gemma2_27b"));
  // transformers 5 refuses 144.0.
  ModelConfig config = preset("gemma2_27b");
  EXPECT_THAT(
      to_hf_json(config, "bfloat16"),
      HasSubstr("\"query_pre_attn_scalar\": 144,"));
  config.block.attention.query_pre_attn_scalar = 144.5;
  EXPECT_EQ(read(to_hf_json(config, "bfloat16")), config);
}

TEST_F(FamilyConfigs, LlamaWithBiasesAndRopes) {
  const auto llama = [](const std::string& more) {
    return R"({"model_type": "llama", "hidden_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 4,
      "intermediate_size": 96, "vocab_size": 257,
      "max_position_embeddings": 4096)" +
           more + "}";
  };
  const ModelConfig biased =
      read(llama(R"(, "attention_bias": true, "mlp_bias": true)"));
  EXPECT_TRUE(biased.block.attention.qkv_bias);
  EXPECT_TRUE(biased.block.attention.output_bias);
  EXPECT_TRUE(biased.block.mlp_bias);
  EXPECT_EQ(read(to_hf_json(biased, "float32")), biased);

  const ModelConfig linear =
      read(llama(R"(, "rope_scaling": {"type": "linear", "factor": 4.0})"));
  EXPECT_EQ(linear.rope_scaling->type, nn::RopeType::linear);
  EXPECT_EQ(linear.rope_scaling->factor, 4.0);
  EXPECT_EQ(linear.max_seq_len, 4096);

  const ModelConfig dynamic = read(
      llama(R"(, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0})"));
  EXPECT_EQ(dynamic.rope_scaling->original_max_positions, 4096);
  EXPECT_EQ(dynamic.max_seq_len, 8192);

  const ModelConfig yarn = read(llama(R"(, "rope_parameters": {
      "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0,
      "original_max_position_embeddings": 512})"));
  EXPECT_EQ(yarn.rope_theta, 500.0);
  EXPECT_EQ(yarn.rope_scaling->original_max_positions, 512);
  EXPECT_NEAR(yarn.rope_scaling->attention_factor, 1.2079441542, 1e-9);

  for (const ModelConfig& config : {linear, dynamic, yarn}) {
    EXPECT_EQ(read(to_hf_json(config, "float32")), config);
  }
  EXPECT_THAT(
      refusal(llama(R"(, "rope_scaling": {"rope_type": "spiral"})")),
      HasSubstr("'longrope', got 'spiral'; it is not supported"));
}

TEST_F(FamilyConfigs, WindowsByLayer) {
  const auto qwen = [](const std::string& more) {
    return R"({"model_type": "qwen2", "hidden_size": 64,
      "num_hidden_layers": 4, "num_attention_heads": 4,
      "intermediate_size": 96, "vocab_size": 257)" +
           more + "}";
  };
  const ModelConfig last = read(qwen(R"(, "use_sliding_window": true,
      "sliding_window": 32, "max_window_layers": 3)"));
  EXPECT_FALSE(last.block.attention.has_window(2));
  EXPECT_TRUE(last.block.attention.has_window(3));
  const ModelConfig by_type = read(qwen(R"(, "use_sliding_window": true,
      "sliding_window": 32, "layer_types": ["full_attention",
      "sliding_attention", "full_attention", "sliding_attention"])"));
  EXPECT_EQ(
      by_type.block.attention.window_pattern,
      (std::vector<bool>{false, true}));
  for (const ModelConfig& config : {last, by_type}) {
    EXPECT_EQ(read(to_hf_json(config, "float32")), config);
  }
  EXPECT_EQ(read(qwen(R"(, "sliding_window": 32)")).block.attention.window, 0);
  EXPECT_THAT(
      refusal(qwen(R"(, "use_sliding_window": true, "layer_types":
          ["chunked_attention", "full_attention", "full_attention",
           "full_attention"])")),
      HasSubstr("got 'chunked_attention'"));
}

TEST(Families, UnknownOnesAreAnsweredWithTheList) {
  ModelConfig config;
  config.family = "gpt2";
  try {
    config.validate();
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(
        error.message(),
        "model.family: expected one of llama, qwen2, qwen3, mistral, olmo2, "
        "phi3, gemma2, gemma3, mixtral, qwen3_moe, gpt_oss, moe, got 'gpt2'; "
        "it is not supported");
  }
}

TEST(Families, OptionsThatTheirConfigJsonCannotSayAreRefused) {
  const auto refusal = [](const char* family, auto change) {
    ModelConfig config = family_defaults(family);
    change(config);
    try {
      config.validate();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::config);
      return error.message();
    }
    return std::string("did not throw");
  };
  EXPECT_EQ(
      refusal("llama", [](ModelConfig& c) { c.block.attention.window = 64; }),
      "model.sliding_window: all models of the family llama have the same "
      "value; remove the key, or use another family");
  EXPECT_THAT(
      refusal(
          "qwen2",
          [](ModelConfig& c) { c.block.attention.output_bias = true; }),
      HasSubstr("model.attention_bias: all models of the family qwen2"));
  EXPECT_THAT(
      refusal(
          "olmo2",
          [](ModelConfig& c) {
            c.rope_scaling = nn::RopeScaling{.type = nn::RopeType::yarn};
          }),
      HasSubstr("model.rope_scaling: models of the family olmo2"));
  EXPECT_THAT(
      refusal("gemma3", [](ModelConfig& c) { c.local_rope_theta = 0; }),
      HasSubstr("model.local_rope_theta"));
  EXPECT_THAT(
      refusal("mistral", [](ModelConfig& c) { c.moe.num_experts = 4; }),
      HasSubstr("model.num_experts: the family mistral has no experts"));
}

TEST(FamilyNames, FusedTensorsAreRowsOfOneAnother) {
  ModelConfig config = preset("phi3_medium");
  const std::string p = "model.layers.7.";
  const auto entry = [&](const std::string& name,
                         std::vector<std::int64_t> shape) {
    const auto entries = hf_entries(config, p + name, shape);
    EXPECT_EQ(entries.size(), 1U);
    return entries.front();
  };
  EXPECT_EQ(
      entry("self_attn.k_proj.weight", {1280, 5120}),
      (StoredEntry{p + "self_attn.qkv_proj.weight", {1280, 5120}, 5120, 7680}));
  const StoredEntry up = entry("mlp.up_proj.weight", {17920, 5120});
  EXPECT_EQ(up.name, p + "mlp.gate_up_proj.weight");
  EXPECT_EQ(up.begin(), 17920 * 5120);
  EXPECT_EQ(up.tensor_shape(), (std::vector<std::int64_t>{2 * 17920, 5120}));
  EXPECT_TRUE(entry("self_attn.o_proj.weight", {5120, 5120}).is_whole());
  EXPECT_TRUE(entry("mlp.down_proj.weight", {5120, 17920}).is_whole());
}

TEST(FamilyNames, ExpertsOfGptOssAreTogether) {
  const ModelConfig config = preset("gpt_oss_tiny");
  const auto name_of = [&](const std::string& ours,
                           const std::vector<std::int64_t>& shape) {
    const auto entries = hf_entries(config, ours, shape);
    EXPECT_EQ(entries.size(), 1U);
    EXPECT_TRUE(entries.front().is_whole());
    EXPECT_EQ(entries.front().shape, shape);
    return entries.front().name;
  };
  const std::string p = "model.layers.1.";
  EXPECT_EQ(name_of(p + "mlp.gate.bias", {4}), p + "mlp.router.bias");
  for (const std::string same :
       {"self_attn.sinks",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj_bias"}) {
    EXPECT_EQ(name_of(p + same, {4, 6, 2}), p + same);
  }
}

TEST(FamilyNames, NormsOfGemma) {
  const ModelConfig config = preset("gemma3_1b");
  const auto name = [&](const std::string& ours) {
    return hf_entries(config, "model.layers.3." + ours, {8}).front().name;
  };
  const std::string p = "model.layers.3.";
  EXPECT_EQ(name("input_layernorm.weight"), p + "input_layernorm.weight");
  EXPECT_EQ(
      name("self_attn.post_norm.weight"),
      p + "post_attention_layernorm.weight");
  EXPECT_EQ(
      name("post_attention_layernorm.weight"),
      p + "pre_feedforward_layernorm.weight");
  EXPECT_EQ(
      name("mlp.post_norm.weight"),
      p + "post_feedforward_layernorm.weight");
  EXPECT_EQ(name("self_attn.q_norm.weight"), p + "self_attn.q_norm.weight");
}

// The published sizes.
TEST(FamilyFlops, ParameterCounts) {
  const std::pair<const char*, std::int64_t> counts[] = {
      {"qwen2_5_0_5b", 494032768},     {"qwen2_5_1_5b", 1543714304},
      {"qwen2_5_3b", 3085938688},      {"qwen2_5_7b", 7615616512},
      {"qwen2_5_14b", 14770033664},    {"qwen2_5_32b", 32763876352},
      {"qwen2_5_72b", 72706203648},    {"qwen3_0_6b", 596049920},
      {"qwen3_1_7b", 1720574976},      {"qwen3_4b", 4022468096},
      {"qwen3_8b", 8190735360},        {"qwen3_14b", 14768307200},
      {"qwen3_32b", 32762123264},      {"mistral_7b_v0_1", 7241732096},
      {"mistral_7b_v0_3", 7248023552}, {"mistral_nemo_12b", 12247782400},
      {"olmo2_1b", 1484916736},        {"olmo2_7b", 7298617344},
      {"olmo2_13b", 13716198400},      {"olmo2_32b", 32234279936},
      {"phi3_mini", 3821079552},       {"phi3_medium", 13960238080},
      {"phi4", 14659507200},           {"gemma2_2b", 2614341888},
      {"gemma2_9b", 9241705984},       {"gemma2_27b", 27227128320},
      {"gemma3_270m", 268098176},      {"gemma3_1b", 999885952},
      {"gemma3_4b", 3880263168},       {"gemma3_12b", 11766034176},
      {"gemma3_27b", 27009346304},     {"gpt_oss_20b", 20914757184},
      {"gpt_oss_120b", 116829156672}};
  for (const auto& [name, count] : counts) {
    EXPECT_EQ(num_parameters(preset(name)), count) << name;
  }
}

TEST(FamilyFlops, CountWindows) {
  ModelConfig config = preset("mistral_7b_v0_1");
  const auto attention = [&](std::int64_t seq, FlopsConvention convention) {
    return flops_per_token(config, seq, convention) -
           6.0 * static_cast<double>(num_matmul_parameters(config));
  };
  constexpr auto kCausal = FlopsConvention::causal;
  const double per_token = 12.0 * 32 * 4096;  // of a token that is attended to
  // Up to the window a causal sequence: half of it.
  EXPECT_DOUBLE_EQ(attention(4096, kCausal), per_token * 2048);
  // Beyond: 4096 tokens less what the first ones lack.
  EXPECT_DOUBLE_EQ(attention(16384, kCausal), per_token * (4096 - 512));
  EXPECT_DOUBLE_EQ(
      attention(16384, FlopsConvention::full_attention),
      2 * attention(16384, kCausal));
  // One block of six has no window.
  config = preset("gemma3_1b");
  const double per_block = 12.0 * 4 * 256;
  EXPECT_DOUBLE_EQ(
      attention(2048, kCausal),
      per_block * (4 * 1024 + 22 * (512 - 64)));
}

}  // namespace
}  // namespace flatshard::models
