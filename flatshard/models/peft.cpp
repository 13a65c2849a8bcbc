#include "flatshard/models/peft.h"

#include "flatshard/core/error.h"
#include "flatshard/models/families/hf_reader.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/lora.h"

#include <fmt/format.h>

#include <algorithm>
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

// Keys of adapter_config.json that never change the result of an adapter if its
// tensors match lora.targets, whatever their values are.
constexpr std::string_view kHarmlessKeys[] = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",  // of modules_to_save
    "eva_config",           // of the first A
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",  // of megatron_config
    "peft_version",
    "qalora_group_size",  // of use_qalora
    "revision",
    "runtime_config",
    "target_modules",
    "task_type"};

// Keys that check_peft_json compares.
constexpr std::string_view kComparedKeys[] =
    {"bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "use_rslora"};

// Initializations that only draw A and B. Others change the weights of the base
// model, so the adapter is valid only with the changed weights.
constexpr std::string_view kHarmlessInits[] = {"eva", "gaussian", "orthogonal"};

// A value that turns its key off: false, null, or an empty list, object or
// text.
bool is_off(const nlohmann::json& value) {
  const bool is_empty_text =
      value.is_string() && value.get_ref<const std::string&>().empty();
  return value.is_null() || value == false || is_empty_text ||
         (value.is_structured() && value.empty());
}

// Rejects every key that may change results and is not supported here,
// including keys of later versions of PEFT.
void refuse_other_keys(const HfReader& reader, const nlohmann::json& json) {
  for (const auto& [key, value] : json.items()) {
    FLATSHARD_CHECK(
        is_off(value) || std::ranges::count(kHarmlessKeys, key) > 0 ||
            std::ranges::count(kComparedKeys, key) > 0,
        format,
        "{}: '{}' = {} is not supported; use an adapter without it",
        reader.file(),
        key,
        value.dump());
  }
}

void check_init(const HfReader& reader) {
  constexpr const char* kKey = "init_lora_weights";
  if (!reader.has(kKey)) {
    return;
  }
  const auto value = reader.need<nlohmann::json>(kKey);
  FLATSHARD_CHECK(
      value.is_boolean() ||
          (value.is_string() && std::ranges::count(
                                    kHarmlessInits,
                                    value.get_ref<const std::string&>()) > 0),
      format,
      "{}: '{}' = {} is not supported, because peft changes the weights of "
      "the base model for it; save_pretrained(..., "
      "path_initial_model_for_weight_conversion=...) of peft converts "
      "adapters of pissa, olora and corda for the original model",
      reader.file(),
      kKey,
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
  refuse_other_keys(reader, json);
  check_init(reader);
  const auto check = [&](const char* key, const char* ours, auto want) {
    const auto found = reader.need<decltype(want)>(key);
    FLATSHARD_CHECK(
        found == want,
        config,
        "{}: expected lora.{} = {} (its '{}'), got {}",
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
