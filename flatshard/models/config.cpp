#include "flatshard/models/config.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

namespace flatshard::models {
namespace {

constexpr nn::RopeScaling kLlama31{
    .factor = 8.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};
constexpr nn::RopeScaling kLlama32{
    .factor = 32.0,
    .low_freq_factor = 1.0,
    .high_freq_factor = 4.0,
    .original_max_positions = 8192};

std::vector<std::pair<std::string_view, ModelConfig>> presets() {
  return {
      {"llama3_1b",
       {.dim = 2048,
        .layers = 16,
        .heads = 32,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
        .tie_embeddings = true}},
      {"llama3_3b",
       {.dim = 3072,
        .layers = 28,
        .heads = 24,
        .kv_heads = 8,
        .ffn_dim = 8192,
        .max_seq_len = 131072,
        .rope_scaling = kLlama32,
        .tie_embeddings = true}},
      {"llama3_8b", {}},
      {"llama3_70b",
       {.dim = 8192,
        .layers = 80,
        .heads = 64,
        .kv_heads = 8,
        .ffn_dim = 28672}},
      {"llama3_405b",
       {.dim = 16384,
        .layers = 126,
        .heads = 128,
        .kv_heads = 8,
        .ffn_dim = 53248,
        .max_seq_len = 131072,
        .rope_scaling = kLlama31}},
  };
}

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

void ModelConfig::validate() {
  FLATSHARD_CHECK(
      family == "llama",
      config,
      "model.family: expected 'llama', got '{}'; it is not supported",
      family);
  const std::pair<const char*, std::int64_t> positive[] = {
      {"dim", dim},
      {"layers", layers},
      {"heads", heads},
      {"kv_heads", kv_heads},
      {"ffn_dim", ffn_dim},
      {"vocab_size", vocab_size},
      {"max_seq_len", max_seq_len}};
  for (const auto& [name, value] : positive) {
    FLATSHARD_CHECK(
        value > 0,
        config,
        "model.{}: expected a positive number, got {}",
        name,
        value);
  }
  FLATSHARD_CHECK(
      heads % kv_heads == 0,
      config,
      "model.kv_heads: expected a divisor of heads {}, got {}",
      heads,
      kv_heads);
  if (head_dim == 0) {
    FLATSHARD_CHECK(
        dim % heads == 0,
        config,
        "model.heads: expected a divisor of dim {} (or set head_dim), got {}",
        dim,
        heads);
    head_dim = dim / heads;
  }
  FLATSHARD_CHECK(
      head_dim > 0 && head_dim % 2 == 0,
      config,
      "model.head_dim: expected an even number, got {}",
      head_dim);
  FLATSHARD_CHECK(
      rope_theta > 0.0,
      config,
      "model.rope_theta: expected a positive number, got {}",
      rope_theta);
  FLATSHARD_CHECK(
      norm_eps > 0.0,
      config,
      "model.norm_eps: expected a positive number, got {}",
      norm_eps);
  if (rope_scaling) {
    FLATSHARD_CHECK(
        rope_scaling->factor > 0.0 &&
            rope_scaling->high_freq_factor > rope_scaling->low_freq_factor &&
            rope_scaling->original_max_positions > 0,
        config,
        "model.rope_scaling: expected factor > 0 and high_freq_factor > "
        "low_freq_factor, got {}, {} and {}",
        rope_scaling->factor,
        rope_scaling->high_freq_factor,
        rope_scaling->low_freq_factor);
  }
}

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, config] : presets()) {
    names.push_back(name);
  }
  return names;
}

ModelConfig preset(std::string_view name) {
  for (auto& [known, config] : presets()) {
    if (known == name) {
      ModelConfig found = config;
      found.validate();
      return found;
    }
  }
  FLATSHARD_THROW(
      config,
      "expected a model preset, one of {}, got '{}'",
      fmt::join(preset_names(), ", "),
      name);
}

ModelConfig from_hf_json(const std::filesystem::path& path) {
  const Json json = read_json(path);
  const std::string file = path.string();
  const Reader reader(file, json);
  const std::string type = reader.need<std::string>("model_type");
  FLATSHARD_CHECK(
      type == "llama",
      config,
      "{}: expected model_type 'llama', got '{}'; it is not supported",
      file,
      type);
  if (reader.has("architectures")) {
    const auto names = reader.need<std::vector<std::string>>("architectures");
    FLATSHARD_CHECK(
        names == std::vector<std::string>{"LlamaForCausalLM"},
        config,
        "{}: expected the architecture LlamaForCausalLM, got {}",
        file,
        fmt::join(names, ", "));
  }
  reader.expect<bool>("attention_bias", false);
  reader.expect<bool>("mlp_bias", false);
  reader.expect<std::string>("hidden_act", "silu");
  reader.expect<double>("attention_dropout", 0.0);
  reader.expect<int>("pretraining_tp", 1);
  ModelConfig config{
      .dim = reader.need<std::int64_t>("hidden_size"),
      .layers = reader.need<std::int64_t>("num_hidden_layers"),
      .heads = reader.need<std::int64_t>("num_attention_heads"),
      .head_dim = reader.get<std::int64_t>("head_dim", 0),
      .ffn_dim = reader.need<std::int64_t>("intermediate_size"),
      .vocab_size = reader.need<std::int64_t>("vocab_size"),
      .max_seq_len = reader.get<std::int64_t>("max_position_embeddings", 2048),
      .rope_theta = reader.get<double>("rope_theta", 10000.0),
      .norm_eps = reader.get<double>("rms_norm_eps", 1e-6),
      .tie_embeddings = reader.get<bool>("tie_word_embeddings", false)};
  config.kv_heads =
      reader.get<std::int64_t>("num_key_value_heads", config.heads);
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
  nlohmann::ordered_json json{
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
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
      {"tie_word_embeddings", config.tie_embeddings},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"hidden_act", "silu"}};
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
