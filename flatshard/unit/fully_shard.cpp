#include "flatshard/unit/fully_shard.h"

#include "flatshard/buffer/peer_mesh.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"
#include "flatshard/unit/unit_contents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

namespace flatshard {
namespace {

/// One parameter with all its names and the units that use it.
struct FoundParameter {
  std::vector<std::string> names;
  at::Tensor tensor;
  const nn::ParameterInfo* info = nullptr;
  std::vector<UnitId> units;
  ParameterPlacement placement;
};

/// The tree of units below a root.
struct UnitTree {
  std::vector<nn::Module*> modules;
  std::vector<std::string> names;
  std::vector<UnitId> parents;
  /// Every module below the root -> its closest unit.
  std::unordered_map<const torch::nn::Module*, UnitId> unit_of;

  UnitId common_ancestor(UnitId a, UnitId b) const {
    while (a != b) {
      // Parents have smaller numbers: climb from the larger one.
      (a > b ? a : b) = parents[a > b ? a : b];
    }
    return a;
  }
};

void walk(
    torch::nn::Module& module,
    const std::string& name,
    UnitId enclosing,
    const std::vector<nn::Module*>& chosen,
    UnitTree& tree) {
  auto* as_unit = dynamic_cast<nn::Module*>(&module);
  const bool is_unit =
      tree.modules.empty() ||
      (as_unit != nullptr &&
       std::find(chosen.begin(), chosen.end(), as_unit) != chosen.end());
  UnitId unit = enclosing;
  if (is_unit) {
    unit = static_cast<UnitId>(tree.modules.size());
    tree.modules.push_back(as_unit);
    tree.names.push_back(name.empty() ? "root" : name);
    tree.parents.push_back(enclosing);
  }
  const bool is_new = tree.unit_of.emplace(&module, unit).second;
  FLATSHARD_CHECK(
      is_new || !is_unit,
      usage,
      "module {} is a unit and appears twice in the tree; share its "
      "parameters instead",
      name);
  for (const auto& child : module.named_children()) {
    walk(
        *child.value(),
        name.empty() ? child.key() : name + "." + child.key(),
        unit,
        chosen,
        tree);
  }
}

UnitTree find_units(nn::Module& root, const std::vector<nn::Module*>& chosen) {
  UnitTree tree;
  walk(root, "", kNoUnit, chosen, tree);
  for (nn::Module* module : chosen) {
    FLATSHARD_CHECK(
        module != nullptr && tree.unit_of.contains(module),
        usage,
        "a module in FullyShardOptions::units is not below the root");
  }
  return tree;
}

void check_not_sharded(const nn::NamedParameter& p) {
  const auto owner = ParameterStorage::owner_of(p.tensor);
  FLATSHARD_CHECK(
      !owner || !owner->retired,
      usage,
      "expected parameter {} to have values, got one that fully_shard had "
      "sharded before, in {}: the Runtime that it returned is gone, and the "
      "weights with it. Make the model anew, or keep the Runtime",
      p.name,
      owner->unit);
  FLATSHARD_CHECK(
      !owner,
      usage,
      "expected parameter {} not to be sharded yet, got one of {} of an "
      "earlier "
      "fully_shard; call it once, for the outermost module, with all modules "
      "that are gathered as a whole in FullyShardOptions::units",
      p.name,
      owner->unit);
}

std::vector<FoundParameter> find_parameters(
    nn::Module& root,
    const UnitTree& tree,
    const FullyShardOptions& options) {
  std::vector<FoundParameter> found;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  for (const nn::NamedParameter& p : nn::named_parameters(root)) {
    if (options.ignore && options.ignore(p.name)) {
      FLATSHARD_CHECK(
          !p.tensor.is_meta(),
          usage,
          "parameter {} is ignored but has no memory; materialize it first",
          p.name);
      continue;
    }
    check_not_sharded(p);
    const auto [at, is_new] =
        index.emplace(p.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back(
          {.tensor = p.tensor,
           .info = p.info,
           .placement = options.placement_of ? options.placement_of(p.name)
                                             : ParameterPlacement{}});
    }
    FoundParameter& parameter = found[at->second];
    parameter.names.push_back(p.name);
    parameter.units.push_back(tree.unit_of.at(p.owner));
  }
  return found;
}

Strategy strategy_of(const FullyShardOptions& options, const Mesh& mesh) {
  if (options.custom_strategy) {
    return *options.custom_strategy;
  }
  return Strategy::named(options.strategy, mesh.num_axes());
}

/// Of a placement with a mesh of its own; absent: the model's.
std::optional<Strategy> strategy_of(
    const ParameterPlacement& placement,
    const FullyShardOptions& options) {
  if (placement.strategy || !placement.mesh) {
    return placement.strategy;
  }
  FLATSHARD_CHECK(
      !options.custom_strategy &&
          !find_strategy_name(options.strategy).needs_outer_axis(),
      config,
      "placement_of: a parameter on the sub-mesh {} needs a strategy of its "
      "own, "
      "since the model's, {}, is for the model's axes",
      placement.mesh->to_string(),
      options.strategy);
  return Strategy::named(options.strategy, placement.mesh->num_axes());
}

GroupParameter group_parameter(
    const FoundParameter& p,
    const FullyShardOptions& options) {
  GroupParameter g;
  g.names = p.names;
  g.shape = p.tensor.sizes().vec();
  g.granularity = p.placement.granularity.value_or(options.granularity);
  g.slice = p.placement.slice;
  if (p.info != nullptr) {
    g.init = p.info->init;
    g.attributes = p.info->attributes;
  }
  if (p.tensor.is_meta()) {
    FLATSHARD_CHECK(
        p.info != nullptr,
        usage,
        "parameter {} has neither memory nor an InitSpec; declare it with "
        "nn::Module::declare_parameter",
        p.names.front());
  } else {
    g.values = p.tensor.detach();
  }
  return g;
}

std::unique_ptr<Unit> build_unit(
    UnitId id,
    const UnitTree& tree,
    const std::vector<const FoundParameter*>& parameters,
    const std::shared_ptr<Mesh>& mesh,
    const FullyShardOptions& options) {
  std::vector<UnitMember> members;
  for (const FoundParameter* p : parameters) {
    const ParameterPlacement& placement = p->placement;
    members.push_back(
        {.tensor = p->tensor,
         .parameter = group_parameter(*p, options),
         .precision = options.precision,
         .mesh = placement.mesh ? mesh->sub_mesh(placement.mesh->axis_names())
                                : nullptr,
         .strategy = strategy_of(placement, options),
         .grad_divisor = placement.grad_divisor});
  }
  UnitContents contents = make_unit_contents(
      std::move(members),
      mesh,
      {.name = "unit " + tree.names[id],
       .strategy = strategy_of(options, *mesh),
       .scaling = options.scaling,
       .grad_divisor = options.grad_divisor,
       .narrow_grads = options.narrow_grads,
       .keep_compute_weights = options.keep_compute_weights,
       .peers_read_weights = options.copy_gathers != CopyGathers::none,
       .offload = options.offload,
       .pin_memory = options.pin_memory,
       .layout = options.layout},
      Initializer(options.seed));
  return std::make_unique<Unit>(
      id,
      tree.names[id],
      tree.modules[id],
      std::move(contents.groups),
      std::move(contents.parameters));
}

void connect(
    torch::nn::Module& module,
    const std::shared_ptr<Runtime>& runtime) {
  if (auto* ours = dynamic_cast<nn::Module*>(&module)) {
    ours->set_wgrad_sink(runtime);
    ours->set_recompute_listener(runtime);
    ours->set_region_runner(runtime->region_runner());
  }
  for (const auto& child : module.children()) {
    connect(*child, runtime);
  }
}

}  // namespace

std::shared_ptr<Runtime> fully_shard(
    nn::Module& root,
    std::shared_ptr<Mesh> mesh,
    FullyShardOptions options) {
  set_current_device(mesh->device());
  const UnitTree tree = find_units(root, options.units);
  const auto found = find_parameters(root, tree, options);
  std::vector<PeerUse> uses{{mesh, strategy_of(options, *mesh)}};
  for (const FoundParameter& p : found) {
    if (p.placement.mesh) {
      FLATSHARD_CHECK(
          p.placement.mesh->is_part_of(*mesh),
          config,
          "parameter {}: expected a mesh that is the model's, {}, or a part of "
          "it, got {}",
          p.names.front(),
          mesh->to_string(),
          p.placement.mesh->to_string());
      uses.push_back({p.placement.mesh, *strategy_of(p.placement, options)});
    }
  }
  mesh = with_peer_memory(
      mesh,
      uses,
      {.gathers = options.copy_gathers != CopyGathers::none,
       .reductions_nbytes = options.copy_reductions_nbytes,
       .stream = options.streams});
  std::vector<std::vector<const FoundParameter*>> members(tree.modules.size());
  for (const FoundParameter& p : found) {
    UnitId owner = p.units.front();
    for (const UnitId unit : p.units) {
      owner = tree.common_ancestor(owner, unit);
    }
    members[owner].push_back(&p);
  }
  std::vector<std::unique_ptr<Unit>> units;
  for (UnitId u = 0; u < static_cast<UnitId>(tree.modules.size()); ++u) {
    units.push_back(build_unit(u, tree, members[u], mesh, options));
  }
  auto runtime = Runtime::create(
      std::move(mesh),
      std::move(units),
      tree.parents,
      {.prefetch = options.prefetch,
       .reshard_after_forward = options.reshard_after_forward,
       .copy_gathers = options.copy_gathers,
       .slots_on_demand = options.slots_on_demand,
       .streams = options.streams,
       .trace = options.trace,
       .debug = options.debug,
       .graphs = options.graphs});
  connect(root, runtime);
  return runtime;
}

}  // namespace flatshard
