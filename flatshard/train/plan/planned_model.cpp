#include "flatshard/train/plan/planned_model.h"

#include "flatshard/core/error.h"
#include "flatshard/models/lora.h"
#include "flatshard/models/moe.h"
#include "flatshard/nn/module_tree.h"
#include "flatshard/train/setup/run_lora.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

namespace flatshard {
namespace {

using plan::UnitShape;

/// The first of ranks that share layers which are never called.
class PlannedRanks : public nn::TensorParallel {
 public:
  explicit PlannedRanks(std::int64_t size)
      : TensorParallel(0, static_cast<int>(size)) {}

  at::Tensor all_gather(const at::Tensor& /*part*/) override { refuse(); }
  at::Tensor reduce_scatter(const at::Tensor& /*addend*/) override { refuse(); }
  std::unique_ptr<nn::PendingTensor> start_all_gather(
      const at::Tensor& /*part*/) override {
    refuse();
  }
  std::unique_ptr<nn::PendingTensor> start_reduce_scatter(
      const at::Tensor& /*addend*/) override {
    refuse();
  }

 private:
  [[noreturn]] static void refuse() {
    FLATSHARD_THROW(internal, "a layer of a plan was called");
  }
};

/// Every module below `root` -> its closest unit, as fully_shard numbers them.
void number_units(
    torch::nn::Module& module,
    const std::string& name,
    UnitId enclosing,
    const std::set<const torch::nn::Module*>& chosen,
    std::unordered_map<const torch::nn::Module*, UnitId>& unit_of,
    std::vector<UnitShape>& units) {
  UnitId unit = enclosing;
  if (units.empty() || chosen.contains(&module)) {
    unit = static_cast<UnitId>(units.size());
    units.push_back(
        {.name = name.empty() ? "root" : name, .parent = enclosing});
  }
  unit_of.emplace(&module, unit);
  for (const auto& child : module.named_children()) {
    number_units(
        *child.value(),
        name.empty() ? child.key() : name + "." + child.key(),
        unit,
        chosen,
        unit_of,
        units);
  }
}

std::vector<OwnedParameter> owned_parameters(
    models::Llama& model,
    const std::unordered_map<const torch::nn::Module*, UnitId>& unit_of,
    const std::vector<UnitShape>& units) {
  std::vector<OwnedParameter> found;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  for (const nn::NamedParameter& p : nn::named_parameters(*model)) {
    const UnitId user = unit_of.at(p.owner);
    const auto [at, is_new] =
        index.emplace(p.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back(
          {.name = p.name,
           .shape = p.tensor.sizes().vec(),
           .unit = user,
           .trainable = p.tensor.requires_grad()});
    }
    OwnedParameter& owned = found[at->second];
    owned.reads_planes =
        owned.reads_planes && p.info != nullptr && p.info->reads_planes;
    // A tied one belongs to the closest unit above all its users.
    for (UnitId other = user; owned.unit != other;) {
      (owned.unit > other ? owned.unit : other) =
          units[std::max(owned.unit, other)].parent;
    }
  }
  return found;
}

/// Which unit runs what, and how many gradients it has where.
PlanUnits name_units(
    const std::unordered_map<const torch::nn::Module*, UnitId>& unit_of,
    models::Llama& model,
    const std::vector<OwnedParameter>& parameters) {
  PlanUnits of;
  const auto modules = model->unit_modules();
  of.ends = PlanUnits::Ends{
      .embed = unit_of.at(modules.front().get()),
      .head = unit_of.at(modules.back().get())};
  for (std::size_t i = 1; i + 1 < modules.size(); ++i) {
    of.layers.push_back(unit_of.at(modules[i].get()));
  }
  of.layer_grads.resize(of.layers.size());
  of.embed_has_backward =
      std::ranges::all_of(parameters, &OwnedParameter::trainable);
  for (const OwnedParameter& p : parameters) {
    if (!p.trainable) {
      continue;
    }
    const auto layer = std::ranges::find(of.layers, p.unit);
    if (layer != of.layers.end()) {
      PlanUnits::LayerGrads& grads = of.layer_grads[layer - of.layers.begin()];
      ++(models::is_expert_parameter(p.name)                    ? grads.experts
         : p.name.find(".shared_experts.") != std::string::npos ? grads.shared
                                                                : grads.attend);
    } else if (p.unit == of.ends->embed) {
      ++of.embed_grads;
    } else if (p.unit == of.ends->head) {
      ++of.head_grads;
    } else {
      ++of.root_grads;
    }
  }
  return of;
}

}  // namespace

PlannedModel::PlannedModel(
    const Config& config,
    const models::ModelConfig& shape) {
  const config::Parallelism& p = config.parallelism;
  models::LlamaOptions options;
  options.moe.local_experts = shape.moe.num_experts / p.expert_parallel_degree;
  options.moe.local_ffn_dim =
      shape.moe.ffn_dim / p.expert_tensor_parallel_degree;
  if (p.shares_layers()) {
    options.ranks = std::make_shared<PlannedRanks>(p.tensor_parallel_degree);
  }
  model = models::Llama(shape, options);
  if (config.lora.enabled()) {
    models::add_lora(*model, lora_config(config));
  }
  std::set<const torch::nn::Module*> chosen;
  for (const auto& module : model->unit_modules()) {
    chosen.insert(module.get());
  }
  std::unordered_map<const torch::nn::Module*, UnitId> unit_of;
  number_units(*model, "", kNoUnit, chosen, unit_of, units);
  parameters = owned_parameters(model, unit_of, units);
  plan_units = name_units(unit_of, model, parameters);
  for (const models::AdaptedLayer& layer : models::adapted_layers(*model)) {
    adapted.insert(layer.weight);
  }
}

}  // namespace flatshard
