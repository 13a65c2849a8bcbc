#include "flatshard/models/lora.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/models/families/family.h"
#include "flatshard/models/hf_names.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace flatshard::models {
namespace {

constexpr std::string_view kWeight = ".weight";

// A linear layer of the blocks.
struct Layer {
  nn::LinearImpl* linear;
  std::string module;  // name of the module in transformers
};

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

std::vector<Layer> linear_layers(LlamaImpl& model) {
  std::vector<Layer> layers;
  for (const auto& item :
       model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    auto* linear = dynamic_cast<nn::LinearImpl*>(item.value().get());
    if (linear == nullptr) {
      continue;
    }
    std::string name = hf_entries(
                           model.config(),
                           item.key() + std::string(kWeight),
                           linear->whole_shape())
                           .front()
                           .name;
    name.resize(name.size() - kWeight.size());
    layers.push_back({linear, std::move(name)});
  }
  return layers;
}

// Layers of experts, by the names that peft finds them by.
bool names_experts(const ModelConfig& config, const std::string& target) {
  const ExpertNames& names = family_of(config).names.experts;
  return config.moe.num_experts > 0 &&
         (target == names.gate || target == names.up || target == names.down ||
          target == "experts" || target == names.router ||
          target == kAllLinear);
}

void check_targets(
    const ModelConfig& config,
    const LoraConfig& lora,
    const std::set<std::string>& known) {
  for (const std::string& target : lora.targets) {
    FLATSHARD_CHECK(
        !names_experts(config, target),
        config,
        "lora.targets: {} includes the experts or their router, and adapters "
        "do not support them; expected layers of attention, for example "
        "\"q_proj, k_proj, v_proj, o_proj",
        target);
    FLATSHARD_CHECK(
        target != "lm_head" && target != "embed_tokens",
        config,
        "lora.targets: an adapter of {} is not supported; expected some of {}",
        target,
        fmt::join(known, ", "));
    FLATSHARD_CHECK(
        target == kAllLinear || known.contains(target),
        config,
        "lora.targets: expected {} or some of {} (the linear layers of the "
        "family {}), got '{}'",
        kAllLinear,
        fmt::join(known, ", "),
        config.family,
        target);
  }
}

bool is_chosen(const LoraConfig& lora, const std::string& module) {
  const std::string part = last_part(module);
  const auto is_target = [&](const std::string& target) {
    return target == kAllLinear || target == part;
  };
  const auto excludes = [&](const std::string& pattern) {
    return pattern == part ||
           ::fnmatch(pattern.c_str(), module.c_str(), 0) == 0;
  };
  return std::ranges::any_of(lora.targets, is_target) &&
         std::ranges::none_of(lora.exclude, excludes);
}

InitSpec init_of_a(const LoraConfig& lora, std::int64_t in) {
  if (lora.init == LoraInit::gaussian) {
    return InitSpec::normal(0.0F, 1.0F / static_cast<float>(lora.rank));
  }
  const float bound = 1.0F / std::sqrt(static_cast<float>(in));
  return InitSpec::uniform(-bound, bound);
}

}  // namespace

std::vector<std::string> add_lora(
    LlamaImpl& model,
    const LoraConfig& lora,
    const std::shared_ptr<const nn::SampleDropout>& dropout) {
  const std::vector<Layer> layers = linear_layers(model);
  std::set<std::string> known;
  for (const Layer& layer : layers) {
    known.insert(last_part(layer.module));
  }
  check_targets(model.config(), lora, known);
  for (const nn::NamedParameter& p : nn::named_parameters(model)) {
    const_cast<at::Tensor&>(p.tensor).set_requires_grad(false);
  }
  std::vector<std::string> modules;
  std::map<std::string, const nn::LinearImpl*> first_of;
  for (const Layer& layer : layers) {
    if (!is_chosen(lora, layer.module)) {
      continue;
    }
    const auto [first, is_new] = first_of.emplace(layer.module, layer.linear);
    layer.linear->add_adapter(
        {.rank = lora.rank,
         .scale = lora.scale(),
         .a_init = init_of_a(lora, layer.linear->whole_shape()[1]),
         .dropout = dropout,
         .dropout_key = stable_hash(layer.module)},
        is_new ? nullptr : first->second);
    if (is_new) {
      modules.push_back(layer.module);
    }
  }
  FLATSHARD_CHECK(
      !modules.empty(),
      config,
      "lora.exclude leaves none of the layers that lora.targets names; change "
      "one of the two");
  return modules;
}

std::vector<AdaptedLayer> adapted_layers(LlamaImpl& model) {
  std::map<const void*, std::string> names;
  for (const nn::NamedParameter& p : nn::named_parameters(model)) {
    names.emplace(p.tensor.unsafeGetTensorImpl(), p.name);
  }
  const auto name_of = [&](const at::Tensor& parameter) {
    return names.at(parameter.unsafeGetTensorImpl());
  };
  std::vector<AdaptedLayer> adapted;
  for (const Layer& layer : linear_layers(model)) {
    if (const nn::Adapter* adapter = layer.linear->adapter()) {
      adapted.push_back(
          {.weight = name_of(layer.linear->weight()),
           .a = name_of(adapter->a->weight()),
           .b = name_of(adapter->b->weight())});
    }
  }
  return adapted;
}

bool is_adapter_parameter(std::string_view name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

std::int64_t num_adapter_parameters(
    const ModelConfig& config,
    const LoraConfig& lora) {
  LlamaImpl model(config);
  add_lora(model, lora);
  std::int64_t sum = 0;
  std::set<const void*> seen;
  for (const nn::NamedParameter& p : nn::named_parameters(model)) {
    if (is_adapter_parameter(p.name) &&
        seen.insert(p.tensor.unsafeGetTensorImpl()).second) {
      sum += p.tensor.numel();
    }
  }
  return sum;
}

}  // namespace flatshard::models
