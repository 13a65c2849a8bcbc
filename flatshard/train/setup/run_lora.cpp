#include "flatshard/train/setup/run_lora.h"

#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/group/frozen_float8.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/peft.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/config/split_list.h"

#include <ATen/ATen.h>

#include <set>

namespace flatshard {

models::LoraConfig lora_config(const config::Lora& keys) {
  return {
      .rank = keys.rank,
      .alpha = keys.alpha,
      .rslora = keys.rslora,
      .dropout = keys.dropout,
      .init = keys.init,
      .targets = split_list(keys.targets),
      .exclude = split_list(keys.exclude)};
}

std::int64_t num_trainable_parameters(
    const config::Lora& lora,
    const models::ModelConfig& model) {
  return lora.enabled()
             ? models::num_adapter_parameters(model, lora_config(lora))
             : models::num_parameters(model);
}

double matmul_flops_per_token(
    const config::Lora& lora,
    const models::ModelConfig& model) {
  const auto all = static_cast<double>(models::num_matmul_parameters(model));
  return lora.enabled()
             ? 4.0 * all + 6.0 * static_cast<double>(
                                     num_trainable_parameters(lora, model))
             : 6.0 * all;
}

double trained_flops_per_token(
    const config::Lora& lora,
    const models::ModelConfig& model,
    std::int64_t seq_len) {
  const double products =
      6.0 * static_cast<double>(models::num_matmul_parameters(model));
  return models::flops_per_token(model, seq_len) - products +
         matmul_flops_per_token(lora, model);
}

void RunLora::begin_evaluation() const {
  if (dropout) {
    samples().fill_(-1);
  }
}

RunLora add_adapters(
    models::Llama& model,
    const models::LoraConfig& adapters,
    const AdapterDropout& dropout,
    at::Device device) {
  RunLora lora{.config = adapters};
  if (adapters.dropout > 0) {
    lora.dropout = std::make_shared<nn::SampleDropout>(
        adapters.dropout,
        dropout.seed,
        at::full(
            {dropout.local_batch_size},
            -1,
            at::TensorOptions().dtype(at::kLong).device(device)),
        dropout.part);
  }
  lora.num_modules = models::add_lora(*model, lora.config, lora.dropout).size();
  return lora;
}

std::vector<ParamGroup*> frozen_groups(const Runtime& runtime) {
  std::vector<ParamGroup*> groups = runtime.all_groups();
  std::erase_if(groups, [](const ParamGroup* g) { return g->trainable(); });
  return groups;
}

namespace {

// The file has the tensors of the adapters, and no others.
void check_same_layers(
    const std::filesystem::path& folder,
    const models::ModelConfig& model,
    const std::vector<ParamGroup*>& adapters) {
  const HfFolder file(folder, {}, models::kPeftWeights);
  std::set<std::string> found;
  for (const std::string& name : file.names()) {
    found.insert(name);
  }
  const auto entries_of = models::peft_entries_of(model);
  std::set<std::string> wanted;
  for (const ParamGroup* group : adapters) {
    for (const GroupParameter& p : group->parameters()) {
      for (const StoredEntry& entry :
           entries_of(p.names.front(), p.whole_shape())) {
        wanted.insert(entry.name);
      }
    }
  }
  const auto check = [](const auto& names, const auto& in, const char* how) {
    for (const std::string& name : names) {
      FLATSHARD_CHECK(
          in.contains(name),
          config,
          "the adapter {} {}; set lora.targets and lora.exclude to the layers "
          "of its target_modules",
          how,
          name);
    }
  };
  check(wanted, found, "lacks");
  check(found, wanted, "has, and lora.targets does not name,");
}

}  // namespace

void keep_float8_alone(const std::vector<ParamGroup*>& frozen) {
  for (ParamGroup* group : frozen) {
    if (group->options().float8 && group->options().keep_compute_weights) {
      drop_main_weights(*group);
    }
  }
}

void load_adapter(
    const std::filesystem::path& folder,
    const models::LoraConfig& lora,
    const models::ModelConfig& model,
    const std::vector<ParamGroup*>& adapters) {
  for_option("lora.init_from_adapter", [&] {
    models::check_peft_json(folder / models::kPeftConfig, lora);
    check_same_layers(folder, model, adapters);
    init_weights(
        folder,
        adapters,
        {.entries_of = models::peft_entries_of(model),
         .file_name = models::kPeftWeights});
  });
}

std::string peft_config_text(
    const models::LoraConfig& lora,
    const std::string& base,
    const models::ModelConfig& model) {
  models::LlamaImpl shape(model);
  return models::to_peft_json(lora, models::add_lora(shape, lora), base);
}

void save_adapter(
    const std::string& peft_config,
    const models::ModelConfig& model,
    const std::vector<ParamGroup*>& adapters,
    const std::filesystem::path& folder) {
  save_weights(
      {adapters.begin(), adapters.end()},
      folder / models::kPeftWeights,
      {{"format", "pt"}},
      models::peft_entries_of(model));
  if (adapters.front()->model_mesh()->rank() == 0) {
    write_file_atomic(folder / models::kPeftConfig, peft_config);
  }
}

}  // namespace flatshard
