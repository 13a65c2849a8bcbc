#include "flatshard/train/plan/planned_units.h"

#include "flatshard/comm/make_communicator.h"
#include "flatshard/comm/store.h"
#include "flatshard/models/moe.h"

#include <algorithm>
#include <string>
#include <utility>

namespace flatshard {
namespace {

/// Counts the gradients of a unit's parameters that satisfy `counts`.
template <class Counts>
int num_gradients(const UnitShape& unit, Counts&& counts) {
  int num = 0;
  for (const GroupShape& group : unit.groups) {
    if (group.trainable) {
      num += static_cast<int>(std::ranges::count_if(
          group.tensors,
          [&](const TensorSpec& tensor) { return counts(tensor.name); }));
    }
  }
  return num;
}

bool is_shared_expert(const std::string& name) {
  return name.find(".shared_experts.") != std::string::npos;
}

PlanUnits::LayerGrads layer_grads(const UnitShape& unit) {
  const int all = num_gradients(unit, [](const auto&) { return true; });
  PlanUnits::LayerGrads grads;
  grads.experts = num_gradients(unit, models::is_expert_parameter);
  grads.shared = num_gradients(unit, is_shared_expert);
  grads.attend = all - grads.experts - grads.shared;
  return grads;
}

/// Returns which unit runs what, and how many gradients it has where.
/// @param units  of `shapes`.
PlanUnits name_units(
    models::LlamaImpl& model,
    const std::vector<UnitDescription>& units,
    const std::vector<UnitShape>& shapes) {
  const auto all = [](const auto&) { return true; };
  const auto unit_of = [&](const std::shared_ptr<nn::Module>& module) {
    return static_cast<UnitId>(
        std::ranges::find(units, module.get(), &UnitDescription::module) -
        units.begin());
  };
  PlanUnits of;
  const auto modules = model.unit_modules();
  of.ends = PlanUnits::Ends{
      .embed = unit_of(modules.front()),
      .head = unit_of(modules.back())};
  for (std::size_t i = 1; i + 1 < modules.size(); ++i) {
    of.layers.push_back(unit_of(modules[i]));
    of.layer_grads.push_back(layer_grads(shapes[of.layers.back()]));
  }
  of.embed_grads = num_gradients(shapes[of.ends->embed], all);
  of.head_grads = num_gradients(shapes[of.ends->head], all);
  of.root_grads = num_gradients(shapes.front(), all);
  of.embed_has_backward = std::ranges::all_of(shapes, [](const auto& unit) {
    return std::ranges::all_of(unit.groups, &GroupShape::trainable);
  });
  return of;
}

}  // namespace

std::shared_ptr<Mesh> planned_mesh(const std::vector<MeshAxis>& axes) {
  MeshOptions options{
      .make_communicator =
          [](const StoreHandle& /*store*/,
             int /*rank*/,
             int /*size*/,
             const std::string& name,
             at::Device device,
             const CommunicatorOptions& /*options*/) {
            return make_self_communicator(name, device);
          },
      .watcher = false};
  return Mesh::create(
      axes,
      /*rank=*/0,
      make_local_store(),
      at::kCPU,
      std::move(options));
}

PlannedUnits planned_units(
    models::Llama& model,
    const std::shared_ptr<Mesh>& mesh,
    const FullyShardOptions& options) {
  PlannedUnits planned{.descriptions = describe(*model, mesh, options)};
  for (const UnitDescription& unit : planned.descriptions) {
    planned.shapes.push_back(unit.shape());
  }
  planned.by_node = name_units(*model, planned.descriptions, planned.shapes);
  return planned;
}

}  // namespace flatshard
