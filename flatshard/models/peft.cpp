#include "flatshard/models/peft.h"

#include "flatshard/core/error.h"
#include "flatshard/models/families/hf_reader.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/lora.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

namespace flatshard::models {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::string_view kFactorA = ".lora_A.weight";
constexpr std::string_view kFactorB = ".lora_B.weight";
constexpr std::string_view kPlainWeight = ".weight";

// Returns the entry of a layer's weight in the base model.
StoredEntry base_entry(
    const ModelConfig& config,
    const std::string& layer,
    const std::vector<std::int64_t>& shape) {
  return hf_entries(config, layer + std::string(kPlainWeight), shape).front();
}

// Lists, objects and texts that mean nothing when they are empty.
void refuse_value(const HfReader& reader, const char* key) {
  if (!reader.has(key)) {
    return;
  }
  const auto value = reader.need<nlohmann::json>(key);
  FLATSHARD_CHECK(
      value.empty() || value == false,
      format,
      "{}: '{}' is {}, which is not supported; expected an adapter without it",
      reader.file(),
      key,
      value.dump());
}

}  // namespace

StoredEntriesOf peft_entries_of(const ModelConfig& config) {
  return [config](
             const std::string& name,
             const std::vector<std::int64_t>& shape) {
    FLATSHARD_CHECK(
        is_adapter_parameter(name),
        internal,
        "expected a parameter of an adapter, got {}",
        name);
    const bool is_a = name.ends_with(kFactorA);
    const std::string_view end = is_a ? kFactorA : kFactorB;
    const std::string layer = name.substr(0, name.size() - end.size());
    StoredEntry entry = base_entry(config, layer, shape);
    std::string module = entry.name;
    module.resize(module.size() - kPlainWeight.size());
    entry.name = fmt::format("{}{}{}", kPeftPrefix, module, end);
    if (is_a) {  // layers that are one module share it
      entry.first_row = 0;
      entry.num_rows = 0;
    }
    return std::vector<StoredEntry>{std::move(entry)};
  };
}

std::string to_peft_json(
    const LoraConfig& lora,
    const std::vector<std::string>& modules,
    const std::string& base) {
  // Last parts are enough where no pattern leaves some modules out.
  std::set<std::string> targets;
  for (const std::string& module : modules) {
    targets.insert(
        lora.exclude.empty() ? module.substr(module.rfind('.') + 1) : module);
  }
  Json json{
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", nullptr},
      {"inference_mode", true},
      {"r", lora.rank},
      {"lora_alpha", lora.alpha},
      {"lora_dropout", lora.dropout},
      {"use_rslora", lora.rslora},
      {"target_modules", targets},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"init_lora_weights", true},
      {"modules_to_save", nullptr},
      {"rank_pattern", Json::object()},
      {"alpha_pattern", Json::object()}};
  if (!base.empty()) {
    json["base_model_name_or_path"] = base;
  }
  if (lora.alpha == std::floor(lora.alpha)) {
    json["lora_alpha"] = static_cast<std::int64_t>(lora.alpha);
  }
  return json.dump(2) + "\n";
}

void check_peft_json(
    const std::filesystem::path& path,
    const LoraConfig& lora) {
  const nlohmann::json json = read_json_object(path);
  const HfReader reader(path.string(), json);
  reader.expect<std::string>("peft_type", "LORA");
  reader.expect<std::string>("bias", "none");
  for (const char* key :
       {"rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layer_replication",
        "use_dora",
        "lora_bias",
        "fan_in_fan_out",
        "trainable_token_indices",
        "target_parameters"}) {
    refuse_value(reader, key);
  }
  const auto check = [&](const char* key, const char* ours, auto want) {
    const auto found = reader.need<decltype(want)>(key);
    FLATSHARD_CHECK(
        found == want,
        config,
        "{}: expected lora.{} = {}, which is its '{}', got {}",
        path.string(),
        ours,
        found,
        key,
        want);
  };
  check("r", "rank", lora.rank);
  check("lora_alpha", "alpha", lora.alpha);
  if (reader.has("use_rslora") || lora.rslora) {
    check("use_rslora", "rslora", lora.rslora);
  }
}

}  // namespace flatshard::models
