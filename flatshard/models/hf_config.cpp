#include "flatshard/models/config.h"
#include "flatshard/models/families/family.h"
#include "flatshard/models/families/hf_rope.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

// config.json and generation_config.json of Hugging Face.
namespace flatshard::models {
namespace {

using Json = nlohmann::ordered_json;

const Family& family_of_type(const std::string& file, const std::string& type) {
  std::vector<std::string_view> types;
  for (const Family* family : families()) {
    if (!family->has_config_json()) {
      continue;
    }
    if (type == family->model_type) {
      return *family;
    }
    types.push_back(family->model_type);
  }
  FLATSHARD_CHECK(
      type != "deepseek_v3" && type != "deepseek_v2",
      config,
      "{}: model_type '{}' is not supported, because it has multi-head latent "
      "attention",
      file,
      type);
  FLATSHARD_CHECK(
      type != "gemma3",
      config,
      "{}: model_type 'gemma3' is not supported, because it has images; use "
      "the text model, gemma3_text: save only the language_model",
      file);
  FLATSHARD_THROW(
      config,
      "{}: expected model_type '{}', got '{}'; it is not supported",
      file,
      fmt::join(types, "', '"),
      type);
}

// transformers' name of what all models of a family have.
std::string activation_name(const Family& family) {
  return family.defaults.block.activation == nn::GateActivation::gelu_tanh
             ? "gelu_pytorch_tanh"
             : "silu";
}

// The model itself, with its head or without, or with another one: transformers
// reads all of them as a causal language model.
void check_architecture(const HfReader& reader, const Family& family) {
  if (!reader.has("architectures")) {
    return;
  }
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
      reader.file(),
      family.architecture,
      fmt::join(names, ", "));
}

}  // namespace

ModelConfig from_hf_json(const std::filesystem::path& path) {
  const nlohmann::json json = read_json_object(path);
  const HfReader reader(path.string(), json);
  const Family& family =
      family_of_type(reader.file(), reader.need<std::string>("model_type"));
  check_architecture(reader, family);
  reader.expect<std::string>(
      std::string(family.activation_key).c_str(),
      activation_name(family));
  reader.expect<double>("attention_dropout", 0.0);
  reader.expect<int>("pretraining_tp", 1);
  const ModelConfig& absent = family.absent;
  ModelConfig config = family.defaults;
  config.dim = reader.need<std::int64_t>("hidden_size");
  config.layers = reader.need<std::int64_t>("num_hidden_layers");
  config.heads = reader.need<std::int64_t>("num_attention_heads");
  config.kv_heads =
      reader.get<std::int64_t>("num_key_value_heads", config.heads);
  config.head_dim = reader.get<std::int64_t>("head_dim", absent.head_dim);
  config.ffn_dim = reader.need<std::int64_t>("intermediate_size");
  config.vocab_size = reader.need<std::int64_t>("vocab_size");
  config.max_seq_len =
      reader.get<std::int64_t>("max_position_embeddings", absent.max_seq_len);
  config.rope_theta = reader.get<double>("rope_theta", absent.rope_theta);
  config.norm_eps = reader.get<double>("rms_norm_eps", absent.norm_eps);
  config.initializer_range =
      reader.get<double>("initializer_range", absent.initializer_range);
  config.tie_embeddings =
      reader.get<bool>("tie_word_embeddings", absent.tie_embeddings);
  if (family.read != nullptr) {
    family.read(reader, config);
  }
  read_rope(reader, config);
  config.validate();
  return config;
}

namespace {

void add_tokens(Json& json, const SpecialTokens& tokens) {
  const auto one = [](const std::optional<std::int64_t>& token) {
    return token ? Json(*token) : Json();
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

const Family& family_to_write(const ModelConfig& config) {
  const Family& family = family_of(config);
  FLATSHARD_CHECK(
      family.has_config_json(),
      config,
      "model.family: {} has no config.json that transformers reads; choose a "
      "family whose model_type transformers supports",
      config.family);
  return family;
}

}  // namespace

SpecialTokens special_tokens_from_hf_json(const std::filesystem::path& path) {
  const nlohmann::json json = read_json_object(path);
  const HfReader reader(path.string(), json);
  SpecialTokens tokens;
  const auto read = [&](const char* key) -> std::optional<std::int64_t> {
    return reader.has(key) ? std::optional(reader.need<std::int64_t>(key))
                           : std::nullopt;
  };
  tokens.bos = read("bos_token_id");
  tokens.pad = read("pad_token_id");
  constexpr const char* kEos = "eos_token_id";
  if (reader.has_list(kEos)) {
    tokens.eos = reader.need<std::vector<std::int64_t>>(kEos);
  } else if (reader.has(kEos)) {
    tokens.eos = {reader.need<std::int64_t>(kEos)};
  }
  return tokens;
}

std::string to_generation_json(const SpecialTokens& tokens) {
  Json json = Json::object();
  add_tokens(json, tokens);
  return json.dump(2) + "\n";
}

std::string to_hf_json(
    const ModelConfig& config,
    std::string_view dtype,
    const SpecialTokens& tokens) {
  const Family& family = family_to_write(config);
  Json json{
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
      {"rms_norm_eps", config.norm_eps},
      {"initializer_range", config.initializer_range},
      {"tie_word_embeddings", config.tie_embeddings},
      {family.activation_key, activation_name(family)}};
  write_rope(config, json);
  if (family.write != nullptr) {
    family.write(config, json);
  }
  add_tokens(json, tokens);
  return json.dump(2) + "\n";
}

}  // namespace flatshard::models
