#include "flatshard/fully_shard/describe.h"

#include "flatshard/core/error.h"
#include "flatshard/unit/parameter_storage.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace flatshard {
namespace {

/// The tree of units below a root.
struct UnitTree {
  std::vector<nn::Module*> modules;
  std::vector<std::string> names;
  std::vector<UnitId> parents;
  std::vector<const UnitChoice*> choices;  ///< the options'; null: none
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

UnitTree find_units(nn::Module& root, const FullyShardOptions& options) {
  std::vector<nn::Module*> chosen = options.units;
  for (const UnitChoice& choice : options.unit_choices) {
    chosen.push_back(choice.module);
  }
  UnitTree tree;
  walk(root, "", kNoUnit, chosen, tree);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    FLATSHARD_CHECK(
        chosen[i] != nullptr && tree.unit_of.contains(chosen[i]),
        usage,
        "a module in FullyShardOptions::{} is not below the root",
        i < options.units.size() ? "units" : "unit_choices");
  }
  tree.choices.resize(tree.modules.size());
  for (const UnitChoice& choice : options.unit_choices) {
    const UnitId unit = tree.unit_of.at(choice.module);
    FLATSHARD_CHECK(
        tree.choices[unit] == nullptr,
        config,
        "FullyShardOptions::unit_choices: expected unit {} once, got it twice",
        tree.names[unit]);
    tree.choices[unit] = &choice;
  }
  return tree;
}

void check_not_sharded(const nn::NamedParameter& p) {
  const auto owner = ParameterStorage::owner_of(p.tensor);
  FLATSHARD_CHECK(
      !owner || !owner->retired,
      usage,
      "parameter {} has no values: an earlier fully_shard sharded it in {}, "
      "and the Runtime that it returned was destroyed together with the "
      "weights. Create the model again, or keep the Runtime",
      p.name,
      owner->unit);
  FLATSHARD_CHECK(
      !owner,
      usage,
      "parameter {} is already sharded, in {} of an earlier fully_shard; call "
      "it once, for the outermost module, with all modules that are unsharded "
      "together in FullyShardOptions::units",
      p.name,
      owner->unit);
}

Strategy strategy_of(const FullyShardOptions& options, const Mesh& mesh) {
  if (options.custom_strategy) {
    return *options.custom_strategy;
  }
  return Strategy::named(options.strategy, mesh.num_axes());
}

/// Returns the strategy of a placement that has its own mesh, nothing when it
/// uses the model mesh.
/// @param mesh  of the model.
std::optional<Strategy> strategy_of(
    const ParameterPlacement& placement,
    const Mesh& mesh,
    const FullyShardOptions& options) {
  if (placement.strategy || !placement.mesh) {
    return placement.strategy;
  }
  const bool keeps_outer_axis =
      placement.mesh->num_axes() > 1 &&
      placement.mesh->axis(0).name == mesh.axis(0).name;
  FLATSHARD_CHECK(
      !options.custom_strategy &&
          (keeps_outer_axis ||
           !find_strategy_name(options.strategy).needs_outer_axis()),
      config,
      "placement_of, unit_choices: a parameter on the sub-mesh {} needs a "
      "separate strategy, because the model's strategy {} is for the model's "
      "axes",
      placement.mesh->to_string(),
      options.strategy);
  return Strategy::named(options.strategy, placement.mesh->num_axes());
}

/// @param choice  of its unit; may be null.
/// @param mesh  of the model.
ParameterPlacement placement_of(
    const std::string& name,
    const UnitChoice* choice,
    const Mesh& mesh,
    const FullyShardOptions& options) {
  ParameterPlacement placement;
  if (options.placement_of) {
    placement = options.placement_of(name);
  }
  if (choice != nullptr) {
    placement = placement.or_else(choice->placement);
  }
  if (!placement.granularity) {
    placement.granularity = options.granularity;
  }
  placement.strategy = strategy_of(placement, mesh, options);
  if (placement.mesh) {
    FLATSHARD_CHECK(
        placement.mesh->is_part_of(mesh),
        config,
        "parameter {}: expected the model's mesh {} or a sub-mesh of it, got "
        "{}",
        name,
        mesh.to_string(),
        placement.mesh->to_string());
    placement.mesh = mesh.sub_mesh(placement.mesh->axis_names());
  }
  return placement;
}

GroupParameter group_parameter(const nn::NamedParameter& p) {
  GroupParameter g;
  g.shape = p.tensor.sizes().vec();
  g.tensor = p.tensor;
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
        p.name);
  } else {
    g.values = p.tensor.detach();
  }
  return g;
}

/// Returns the parameters of each unit of the tree.
std::vector<std::vector<GroupParameter>> find_parameters(
    nn::Module& root,
    const UnitTree& tree,
    const Mesh& mesh,
    const FullyShardOptions& options) {
  std::vector<GroupParameter> found;
  std::vector<UnitId> owners;
  std::vector<bool> reads_planes;
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
    const UnitId user = tree.unit_of.at(p.owner);
    const auto [at, is_new] =
        index.emplace(p.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back(group_parameter(p));
      owners.push_back(user);
      reads_planes.push_back(true);
    }
    // Every unit that shares it has to read it so.
    reads_planes[at->second] =
        reads_planes[at->second] && p.info != nullptr && p.info->reads_planes;
    found[at->second].names.push_back(p.name);
    UnitId& owner = owners[at->second];
    owner = tree.common_ancestor(owner, user);
  }
  std::vector<std::vector<GroupParameter>> of_unit(tree.modules.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].placement = placement_of(
        found[i].names.front(),
        tree.choices[owners[i]],
        mesh,
        options);
    if (options.float8_of && reads_planes[i]) {
      found[i].float8 =
          options.float8_of(found[i].names.front(), found[i].shape);
    }
    of_unit[owners[i]].push_back(std::move(found[i]));
  }
  return of_unit;
}

}  // namespace

UnitShape UnitDescription::shape() const {
  UnitShape shape{.name = name, .parent = parent, .policy = policy};
  for (const GroupDescription& group : groups) {
    shape.groups.push_back(group.shape());
  }
  return shape;
}

std::vector<UnitDescription> describe(
    nn::Module& root,
    const std::shared_ptr<Mesh>& mesh,
    const FullyShardOptions& options) {
  const UnitTree tree = find_units(root, options);
  auto parameters = find_parameters(root, tree, *mesh, options);
  const Strategy strategy = strategy_of(options, *mesh);
  FLATSHARD_CHECK(
      options.group.post_forward_ranks == 0 ||
          num_sharded_axes(strategy.parameter) > 0,
      config,
      "post_forward_ranks = {} has no effect with strategy {}, because every "
      "rank has the full weights; set it to 0, or use zero3",
      options.group.post_forward_ranks,
      strategy.name);
  std::vector<UnitDescription> units;
  for (std::size_t u = 0; u < tree.modules.size(); ++u) {
    const UnitChoice* const choice = tree.choices[u];
    units.push_back(
        {.name = tree.names[u],
         .module = tree.modules[u],
         .parent = tree.parents[u],
         .policy = choice != nullptr && choice->policy
                       ? *choice->policy
                       : options.runtime.unit_policy(),
         .groups = describe_groups(
             {.name = "unit " + tree.names[u],
              .parameters = std::move(parameters[u]),
              .mesh = mesh,
              .strategy = strategy,
              .peers_read = options.runtime.copy_engines.gather()},
             options.group)});
  }
  return units;
}

}  // namespace flatshard
