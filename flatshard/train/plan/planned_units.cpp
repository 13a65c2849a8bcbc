#include "flatshard/train/plan/planned_units.h"

#include "flatshard/comm/make_communicator.h"
#include "flatshard/comm/store.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/train/setup/float8_choice.h"
#include "flatshard/train/setup/parallelism.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace flatshard {
namespace {

using plan::GroupShape;
using plan::UnitShape;

std::int64_t element_size(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

/// Where rank 0 is among ranks that do not run: nothing communicates.
std::shared_ptr<Mesh> planned_mesh(const Config& config) {
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
      mesh_axes(config),
      /*rank=*/0,
      make_local_store(),
      at::kCPU,
      std::move(options));
}

/// Sizes and strides of a mesh's axes.
struct Axes {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

/// @param mesh  a part of `whole`.
Axes axes_of(const Mesh& mesh, const Mesh& whole) {
  Axes axes;
  std::int64_t stride = 1;
  for (int i = whole.num_axes() - 1; i >= 0; --i) {
    const MeshAxis& axis = whole.axis(i);
    if (std::ranges::find(mesh.axes(), axis) != mesh.axes().end()) {
      axes.sizes.insert(axes.sizes.begin(), axis.size);
      axes.strides.insert(axes.strides.begin(), stride);
    }
    stride *= axis.size;
  }
  return axes;
}

/// As Float8Scales counts them.
std::int64_t num_scales(
    const float8::RecipeTraits& traits,
    std::int64_t outer,
    std::int64_t inner) {
  constexpr std::int64_t kMultiple = 4;
  if (traits.has_one_scale()) {
    return 1;
  }
  const std::int64_t rows = outer / traits.block_outer;
  return traits.block_inner == 0
             ? rows
             : rows * ((inner / traits.block_inner + kMultiple - 1) /
                       kMultiple * kMultiple);
}

/// A group's FP8 planes, once its tensors are known.
void use_float8(const Float8Format& format, GroupShape& group) {
  const float8::RecipeTraits traits = float8::traits_of(format.recipe);
  plan::Float8Shape float8{
      .recipe = std::string(float8::to_string(format.recipe)),
      .sharded_scales_block = format.block_of_stored_scales(),
      .stored_columns = format.stored_columns,
      .scales_behind_columns = !traits.scales_are_sharded &&
                               float8::has_power_of_two_scales(format.recipe),
      .gather_parts = format.gather_parts};
  const bool own_columns =
      format.stored_columns ||
      (traits.rows_share_scales() && !traits.has_one_scale());
  const auto parts =
      format.parts_of(static_cast<std::int64_t>(group.tensors.size()));
  for (std::size_t i = 0; i < group.tensors.size(); ++i) {
    TensorSpec& spec = group.tensors[i];
    spec.part = parts[i];
    const Granularity own = format.granularity();
    const Granularity::Kind asked = spec.granularity.kind();
    const bool stays = asked == Granularity::Kind::tensor ||
                       (asked == Granularity::Kind::chunk &&
                        own.kind() == Granularity::Kind::row);
    if (!stays) {
      spec.granularity = own;
    }
    float8.rows_scales.push_back(
        num_scales(traits, spec.shape[0], spec.shape[1]));
    if (own_columns) {
      float8.columns_scales.push_back(
          num_scales(traits, spec.shape[1], spec.shape[0]));
    }
  }
  group.alignment = format.alignment(group.alignment);
  group.float8 = std::move(float8);
}

GroupShape new_group(
    const Config& config,
    const Axes& axes,
    bool trainable,
    std::int64_t microbatches) {
  const config::Precision& precision = config.precision;
  return {
      .strategy = Strategy::named(
          strategy_name(config),
          static_cast<int>(axes.sizes.size())),
      .axis_sizes = axes.sizes,
      .axis_strides = axes.strides,
      .sizes =
          {.main = element_size(precision.main_params),
           .compute = element_size(precision.compute),
           .reduce = element_size(precision.reduce),
           .gradient = element_size(
               microbatches == 1 ? precision.reduce : precision.main_grads)},
      .trainable = trainable,
      .keep_compute_weights = config.parallelism.keep_compute_weights,
      .post_forward_ranks = config.parallelism.post_forward_ranks};
}

}  // namespace

std::vector<UnitShape> planned_units(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t microbatches,
    PlannedModel& modules) {
  const std::shared_ptr<Mesh> mesh = planned_mesh(config);
  FullyShardOptions options;
  Float8Choice(config, model).apply_to(options);
  options.placement_of = parameter_placement(config, modules.model, *mesh);
  std::optional<Float8Format> float8;  // of all FP8 weights
  std::vector<UnitShape> units = modules.units;
  for (const OwnedParameter& p : modules.parameters) {
    const ParameterPlacement placement = options.placement_of
                                             ? options.placement_of(p.name)
                                             : ParameterPlacement{};
    std::optional<Float8Format> format;
    if (options.float8_of && p.reads_planes) {
      format = options.float8_of(p.name, p.shape);
    }
    const Axes axes = axes_of(placement.mesh ? *placement.mesh : *mesh, *mesh);
    std::vector<GroupShape>& groups = units[p.unit].groups;
    auto group = std::ranges::find_if(groups, [&](const GroupShape& g) {
      return g.axis_sizes == axes.sizes && g.axis_strides == axes.strides &&
             g.trainable == p.trainable &&
             g.float8.has_value() == format.has_value();
    });
    if (group == groups.end()) {
      groups.push_back(new_group(config, axes, p.trainable, microbatches));
      group = groups.end() - 1;
      if (format) {
        float8 = format;
        group->float8.emplace();
      }
    }
    group->tensors.push_back({p.name, p.shape, config.parallelism.granularity});
  }
  for (UnitShape& unit : units) {
    unit.policy.reshard_after_forward =
        config.parallelism.reshard_after_forward;
    for (GroupShape& group : unit.groups) {
      if (group.float8) {
        use_float8(*float8, group);
      }
    }
  }
  return units;
}

}  // namespace flatshard
