#include "flatshard/models/config.h"

#include "flatshard/core/error.h"
#include "flatshard/core/placeholder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

// config.json and generation_config.json of Hugging Face.
namespace flatshard::models {
namespace {

using Json = nlohmann::json;

// Typed reading of one JSON object with errors that name file and key.
class Reader {
 public:
  Reader(std::string file, const Json& json)
      : file_(std::move(file)), json_(json) {}

  bool has(const char* key) const {
    return json_.contains(key) && !json_.at(key).is_null();
  }

  template <class T>
  T need(const char* key) const {
    FLATSHARD_CHECK(
        has(key),
        format,
        "{}: expected the key '{}', found none",
        file_,
        key);
    try {
      return json_.at(key).get<T>();
    } catch (const Json::exception& e) {
      FLATSHARD_THROW(
          format,
          "{}: key '{}' has the value {}: {}",
          file_,
          key,
          json_.at(key).dump(),
          e.what());
    }
  }

  template <class T>
  T get(const char* key, T otherwise) const {
    return has(key) ? need<T>(key) : otherwise;
  }

  template <class T>
  void expect(const char* key, const T& supported) const {
    const T value = get<T>(key, supported);
    FLATSHARD_CHECK(
        value == supported,
        config,
        "{}: expected {} = {}, got {}; it is not supported",
        file_,
        key,
        Json(supported).dump(),
        Json(value).dump());
  }

  void refuse(const char* key) const {
    FLATSHARD_CHECK(
        !has(key),
        config,
        "{}: expected {} = null, got {}; it is not supported",
        file_,
        key,
        json_.at(key).dump());
  }

 private:
  std::string file_;
  const Json& json_;
};

std::optional<nn::RopeScaling> read_scaling(
    const std::string& file,
    const Json& json) {
  const Reader reader(file + ": rope_scaling", json);
  const std::string type = reader.has("rope_type")
                               ? reader.need<std::string>("rope_type")
                               : reader.get<std::string>("type", "default");
  if (type == "default") {
    return std::nullopt;
  }
  FLATSHARD_CHECK(
      type == "llama3",
      config,
      "{}: expected rope_scaling.rope_type 'default' or 'llama3', got '{}'; it "
      "is not supported",
      file,
      type);
  return nn::RopeScaling{
      .factor = reader.need<double>("factor"),
      .low_freq_factor = reader.need<double>("low_freq_factor"),
      .high_freq_factor = reader.need<double>("high_freq_factor"),
      .original_max_positions =
          reader.need<std::int64_t>("original_max_position_embeddings")};
}

Json read_json(const std::filesystem::path& path) {
  std::ifstream in(path);
  FLATSHARD_CHECK(
      in.good(),
      io,
      "expected a readable file, got '{}'",
      path.string());
  const std::string text{
      std::istreambuf_iterator<char>(in),
      std::istreambuf_iterator<char>()};
  refuse_placeholder(path, text);
  try {
    Json json = Json::parse(text);
    FLATSHARD_CHECK(
        json.is_object(),
        format,
        "{}: expected a JSON object, got {}",
        path.string(),
        json.type_name());
    return json;
  } catch (const Json::parse_error& e) {
    FLATSHARD_THROW(format, "{}: expected JSON: {}", path.string(), e.what());
  }
}

}  // namespace

namespace {

// What a family is called in config.json.
struct HfFamily {
  const char* family;
  const char* model_type;
  const char* architecture;
};

constexpr HfFamily kHfFamilies[] = {
    {"llama", "llama", "LlamaForCausalLM"},
    {"mixtral", "mixtral", "MixtralForCausalLM"},
    {"qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM"}};

const HfFamily& family_of_type(
    const std::string& file,
    const std::string& type) {
  std::vector<std::string_view> types;
  for (const HfFamily& family : kHfFamilies) {
    if (type == family.model_type) {
      return family;
    }
    types.emplace_back(family.model_type);
  }
  FLATSHARD_CHECK(
      type != "deepseek_v3" && type != "deepseek_v2",
      config,
      "{}: model_type '{}' has multi-head latent attention, which is not "
      "supported",
      file,
      type);
  FLATSHARD_THROW(
      config,
      "{}: expected model_type '{}', got '{}'; it is not supported",
      file,
      fmt::join(types, "', '"),
      type);
}

void read_mixtral(const Reader& reader, ModelConfig& config) {
  reader.expect<double>("router_jitter_noise", 0.0);
  reader.refuse("sliding_window");
  config.rope_theta = reader.get<double>("rope_theta", 1e6);
  config.norm_eps = reader.get<double>("rms_norm_eps", 1e-5);
  config.moe = {
      .num_experts = reader.need<std::int64_t>("num_local_experts"),
      .experts_per_token = reader.need<std::int64_t>("num_experts_per_tok")};
}

// Blocks without experts have to be the first ones.
std::int64_t read_dense_layers(const std::string& file, const Reader& reader) {
  const auto layers =
      reader.get<std::vector<std::int64_t>>("mlp_only_layers", {});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    FLATSHARD_CHECK(
        layers[i] == static_cast<std::int64_t>(i),
        config,
        "{}: expected mlp_only_layers to be the first layers, got [{}]; it is "
        "not supported",
        file,
        fmt::join(layers, ", "));
  }
  return static_cast<std::int64_t>(layers.size());
}

void read_qwen3_moe(
    const std::string& file,
    const Reader& reader,
    ModelConfig& config) {
  reader.expect<std::int64_t>("decoder_sparse_step", 1);
  reader.expect<bool>("use_sliding_window", false);
  config.qk_norm = true;
  // transformers 5 writes it as Mixtral's is.
  const char* const experts =
      reader.has("num_local_experts") ? "num_local_experts" : "num_experts";
  config.moe = {
      .num_experts = reader.need<std::int64_t>(experts),
      .experts_per_token = reader.need<std::int64_t>("num_experts_per_tok"),
      .ffn_dim = reader.need<std::int64_t>("moe_intermediate_size"),
      .dense_layers = read_dense_layers(file, reader),
      .router_normalize = reader.need<bool>("norm_topk_prob")};
}

}  // namespace

ModelConfig from_hf_json(const std::filesystem::path& path) {
  const Json json = read_json(path);
  const std::string file = path.string();
  const Reader reader(file, json);
  const HfFamily& family =
      family_of_type(file, reader.need<std::string>("model_type"));
  if (reader.has("architectures")) {
    // The model itself, with its head or without, or with another one:
    // transformers reads all of them as a causal language model.
    const auto names = reader.need<std::vector<std::string>>("architectures");
    const std::string_view name = family.architecture;
    const std::string_view base = name.substr(0, name.find("ForCausalLM"));
    FLATSHARD_CHECK(
        std::all_of(
            names.begin(),
            names.end(),
            [&](const std::string& other) {
              return other == fmt::format("{}Model", base) ||
                     other.starts_with(fmt::format("{}For", base));
            }),
        config,
        "{}: expected the architecture {}, got {}",
        file,
        family.architecture,
        fmt::join(names, ", "));
  }
  reader.expect<bool>("attention_bias", false);
  reader.expect<bool>("mlp_bias", false);
  reader.expect<std::string>("hidden_act", "silu");
  reader.expect<double>("attention_dropout", 0.0);
  reader.expect<int>("pretraining_tp", 1);
  ModelConfig config{
      .family = family.family,
      .dim = reader.need<std::int64_t>("hidden_size"),
      .layers = reader.need<std::int64_t>("num_hidden_layers"),
      .heads = reader.need<std::int64_t>("num_attention_heads"),
      .head_dim = reader.get<std::int64_t>("head_dim", 0),
      .ffn_dim = reader.need<std::int64_t>("intermediate_size"),
      .vocab_size = reader.need<std::int64_t>("vocab_size"),
      .max_seq_len = reader.get<std::int64_t>("max_position_embeddings", 2048),
      .rope_theta = reader.get<double>("rope_theta", 10000.0),
      .norm_eps = reader.get<double>("rms_norm_eps", 1e-6),
      .initializer_range = reader.get<double>("initializer_range", 0.02),
      .tie_embeddings = reader.get<bool>("tie_word_embeddings", false)};
  config.kv_heads =
      reader.get<std::int64_t>("num_key_value_heads", config.heads);
  if (config.family == "mixtral") {
    read_mixtral(reader, config);
  } else if (config.family == "qwen3_moe") {
    read_qwen3_moe(file, reader, config);
  }
  // transformers 5 writes rope_parameters, which holds theta as well.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (reader.has(key)) {
      config.rope_scaling = read_scaling(file, json.at(key));
      config.rope_theta = Reader(file + ": " + key, json.at(key))
                              .get<double>("rope_theta", config.rope_theta);
    }
  }
  config.validate();
  return config;
}

namespace {

void add_tokens(nlohmann::ordered_json& json, const SpecialTokens& tokens) {
  const auto one = [](const std::optional<std::int64_t>& token) {
    return token ? nlohmann::ordered_json(*token) : nlohmann::ordered_json();
  };
  json["bos_token_id"] = one(tokens.bos);
  json["eos_token_id"] = nullptr;
  if (tokens.eos.size() == 1) {
    json["eos_token_id"] = tokens.eos.front();
  } else if (!tokens.eos.empty()) {
    json["eos_token_id"] = tokens.eos;
  }
  json["pad_token_id"] = one(tokens.pad);
}

const HfFamily& family_to_write(const ModelConfig& config) {
  for (const HfFamily& family : kHfFamilies) {
    if (config.family == family.family) {
      return family;
    }
  }
  FLATSHARD_THROW(
      config,
      "model.family: {} has no config.json that transformers reads; only "
      "mixtral and qwen3_moe of those with experts have",
      config.family);
}

void add_experts(nlohmann::ordered_json& json, const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  if (config.family == "mixtral") {
    json["num_local_experts"] = moe.num_experts;
    json["num_experts_per_tok"] = moe.experts_per_token;
    json["sliding_window"] = nullptr;
  } else if (config.family == "qwen3_moe") {
    json["num_experts"] = moe.num_experts;
    json["num_experts_per_tok"] = moe.experts_per_token;
    json["moe_intermediate_size"] = moe.ffn_dim;
    json["norm_topk_prob"] = moe.router_normalize;
    json["decoder_sparse_step"] = 1;
    auto dense = nlohmann::ordered_json::array();
    for (std::int64_t i = 0; i < moe.dense_layers; ++i) {
      dense.push_back(i);
    }
    json["mlp_only_layers"] = dense;
    json["use_sliding_window"] = false;
  }
}

}  // namespace

SpecialTokens special_tokens_from_hf_json(const std::filesystem::path& path) {
  const Json json = read_json(path);
  const Reader reader(path.string(), json);
  SpecialTokens tokens;
  const auto read = [&](const char* key) -> std::optional<std::int64_t> {
    return reader.has(key) ? std::optional(reader.need<std::int64_t>(key))
                           : std::nullopt;
  };
  tokens.bos = read("bos_token_id");
  tokens.pad = read("pad_token_id");
  constexpr const char* kEos = "eos_token_id";
  if (reader.has(kEos) && json.at(kEos).is_array()) {
    tokens.eos = reader.need<std::vector<std::int64_t>>(kEos);
  } else if (reader.has(kEos)) {
    tokens.eos = {reader.need<std::int64_t>(kEos)};
  }
  return tokens;
}

std::string to_generation_json(const SpecialTokens& tokens) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  add_tokens(json, tokens);
  return json.dump(2) + "\n";
}

std::string to_hf_json(
    const ModelConfig& config,
    std::string_view dtype,
    const SpecialTokens& tokens) {
  const HfFamily& family = family_to_write(config);
  nlohmann::ordered_json json{
      {"architectures", {family.architecture}},
      {"model_type", family.model_type},
      {"torch_dtype", dtype},
      {"hidden_size", config.dim},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"num_key_value_heads", config.kv_heads},
      {"head_dim", config.head_dim},
      {"intermediate_size", config.ffn_dim},
      {"vocab_size", config.vocab_size},
      {"max_position_embeddings", config.max_seq_len},
      {"rope_theta", config.rope_theta},
      {"rms_norm_eps", config.norm_eps},
      {"initializer_range", config.initializer_range},
      {"tie_word_embeddings", config.tie_embeddings},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"hidden_act", "silu"}};
  add_experts(json, config);
  add_tokens(json, tokens);
  if (config.rope_scaling) {
    const nn::RopeScaling& scaling = *config.rope_scaling;
    json["rope_scaling"] = {
        {"rope_type", "llama3"},
        {"factor", scaling.factor},
        {"low_freq_factor", scaling.low_freq_factor},
        {"high_freq_factor", scaling.high_freq_factor},
        {"original_max_position_embeddings", scaling.original_max_positions}};
  }
  return json.dump(2) + "\n";
}

}  // namespace flatshard::models
