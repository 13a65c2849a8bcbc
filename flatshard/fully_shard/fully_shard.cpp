#include "flatshard/fully_shard/fully_shard.h"

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/poison.h"
#include "flatshard/diagnostics/strict_checks.h"
#include "flatshard/fully_shard/describe.h"
#include "flatshard/fully_shard/unit_contents.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/nn/module.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

void connect(
    torch::nn::Module& module,
    const std::shared_ptr<Runtime>& runtime,
    bool asks_for_planes) {
  if (auto* ours = dynamic_cast<nn::Module*>(&module)) {
    ours->set_wgrad_sink(runtime);
    ours->set_recompute_listener(runtime);
    if (asks_for_planes) {
      ours->set_weight_source(runtime);
    }
    ours->set_region_runner(runtime->graphs().runner());
  }
  for (const auto& child : module.children()) {
    connect(*child, runtime, asks_for_planes);
  }
}

std::vector<const FlatLayout*> layouts_of(
    const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<const FlatLayout*> layouts;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      layouts.push_back(&group->layout());
    }
  }
  return layouts;
}

}  // namespace

std::shared_ptr<Runtime> fully_shard(
    nn::Module& root,
    std::shared_ptr<Mesh> mesh,
    FullyShardOptions options) {
  set_current_device(mesh->device());
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<UnitId> parents;
  std::vector<UnitPolicy> policies;
  for (UnitDescription& unit : describe(root, mesh, options)) {
    UnitContents contents = make_unit_contents(
        "unit " + unit.name,
        mesh->device(),
        std::move(unit.groups),
        Initializer(options.seed));
    units.push_back(std::make_unique<Unit>(
        static_cast<UnitId>(units.size()),
        unit.name,
        unit.module,
        std::move(contents.groups),
        std::move(contents.parameters)));
    parents.push_back(unit.parent);
    policies.push_back(std::move(unit.policy));
  }
  check_padding(layouts_of(units), options.max_padding);
  auto runtime = Runtime::create(
      std::move(mesh),
      std::move(units),
      parents,
      options.runtime);
  if (options.runtime.debug.poison) {
    Poison::install(runtime);
  }
  if (options.runtime.debug.strict) {
    StrictChecks::install(runtime);
  }
  add_graphs(runtime);
  for (std::size_t u = 0; u < policies.size(); ++u) {
    runtime->gathers().set_policy(static_cast<UnitId>(u), policies[u]);
  }
  const bool asks_for_planes = std::any_of(
      runtime->units().begin(),
      runtime->units().end(),
      [](const auto& unit) { return unit->weights().has_planes_on_request(); });
  connect(root, runtime, asks_for_planes);
  return runtime;
}

}  // namespace flatshard
