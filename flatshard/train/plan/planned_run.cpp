#include "flatshard/train/plan/planned_run.h"

#include "flatshard/comm/make_communicator.h"
#include "flatshard/comm/store.h"
#include "flatshard/core/error.h"
#include "flatshard/layout/padding.h"
#include "flatshard/models/llama.h"
#include "flatshard/models/lora.h"
#include "flatshard/models/moe.h"
#include "flatshard/nn/module_tree.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/float8.h"
#include "flatshard/train/lora/lora.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/parallelism.h"
#include "flatshard/train/plan/model_work.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace flatshard {
namespace {

using plan::GroupShape;
using plan::UnitShape;

std::int64_t element_size(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

/// Returns the bytes of half a window that ranks copy from and to.
std::int64_t aligned_half(std::int64_t nbytes) {
  constexpr std::int64_t kHalf = 256;
  return at::round_up(nbytes, kHalf);
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
  group.layout = format.layout_options(group.layout);
  group.float8 = std::move(float8);
}

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

/// A parameter of the model, by its main name.
struct OwnedParameter {
  std::string name;
  std::vector<std::int64_t> shape;
  UnitId unit = 0;
  bool reads_planes = true;
  bool trainable = true;
};

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

struct PlannedModel {
  PlannedModel(const Config& config, const models::ModelConfig& shape) {
    const config::Parallelism& p = config.parallelism;
    models::LlamaOptions options;
    options.moe.local_experts =
        shape.moe.num_experts / p.expert_parallel_degree;
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

  /// Whether the layer with this weight has one.
  bool has_adapter(const std::string& weight) const {
    return adapted.contains(weight);
  }

  models::Llama model{nullptr};
  std::vector<UnitShape> units;  ///< without groups
  std::vector<OwnedParameter> parameters;
  PlanUnits plan_units;
  std::set<std::string> adapted;  ///< weights of layers with an adapter
};

namespace {

/// Makes the shapes of the groups of all units.
class ShapeMaker {
 public:
  ShapeMaker(
      const Config& config,
      const models::ModelConfig& model,
      std::int64_t microbatches)
      : config_(config),
        model_(model),
        microbatches_(microbatches),
        mesh_(planned_mesh(config)) {
    Float8Choice(config, model).apply_to(options_);
  }

  std::vector<UnitShape> make(PlannedModel& of) {
    options_.placement_of = parameter_placement(config_, of.model, *mesh_);
    std::vector<UnitShape> units = of.units;
    for (const OwnedParameter& p : of.parameters) {
      add(p, units[p.unit]);
    }
    for (UnitShape& unit : units) {
      unit.policy.reshard_after_forward =
          config_.parallelism.reshard_after_forward;
      for (GroupShape& group : unit.groups) {
        if (group.float8) {
          use_float8(*format_, group);
        }
      }
    }
    return units;
  }

  /// Of the parameter with this main name; empty: it is not in FP8.
  std::string recipe_of(const std::string& name) const {
    return float8_names_.contains(name) ? recipe_ : std::string();
  }

 private:
  void add(const OwnedParameter& p, UnitShape& unit) const {
    const ParameterPlacement placement = options_.placement_of
                                             ? options_.placement_of(p.name)
                                             : ParameterPlacement{};
    std::optional<Float8Format> format;
    if (options_.float8_of && p.reads_planes) {
      format = options_.float8_of(p.name, p.shape);
    }
    const Axes axes =
        axes_of(placement.mesh ? *placement.mesh : *mesh_, *mesh_);
    auto group = std::ranges::find_if(unit.groups, [&](const GroupShape& g) {
      return g.axis_sizes == axes.sizes && g.axis_strides == axes.strides &&
             g.trainable == p.trainable &&
             g.float8.has_value() == format.has_value();
    });
    if (group == unit.groups.end()) {
      unit.groups.push_back(new_group(axes, p.trainable));
      group = unit.groups.end() - 1;
      if (format) {
        format_ = format;
        recipe_ = float8::to_string(format->recipe);
        group->float8.emplace();
      }
    }
    if (format) {
      float8_names_.insert(p.name);
    }
    group->tensors.push_back(
        {p.name, p.shape, Granularity::parse(config_.parallelism.granularity)});
  }

  GroupShape new_group(const Axes& axes, bool trainable) const {
    const config::Precision& precision = config_.precision;
    return {
        .strategy = Strategy::named(
            strategy_name(config_),
            static_cast<int>(axes.sizes.size())),
        .axis_sizes = axes.sizes,
        .axis_strides = axes.strides,
        .sizes =
            {.main = element_size(precision.main_params),
             .compute = element_size(precision.compute),
             .reduce = element_size(precision.reduce),
             .gradient = element_size(
                 microbatches_ == 1 ? precision.reduce : precision.main_grads)},
        .trainable = trainable,
        .keep_compute_weights = config_.parallelism.keep_compute_weights,
        .post_forward_ranks = config_.parallelism.post_forward_ranks};
  }

  const Config& config_;
  const models::ModelConfig& model_;
  std::int64_t microbatches_;
  std::shared_ptr<Mesh> mesh_;
  FullyShardOptions options_;
  mutable std::optional<Float8Format> format_;  ///< of all FP8 weights
  mutable std::string recipe_;
  mutable std::set<std::string> float8_names_;
};

/// As choose_copy_engines, where NVLink joins the GPUs of a host.
CopyEngines copy_engines_of(
    const Config& config,
    const Strategy& strategy,
    const plan::Job& job) {
  const config::Parallelism& p = config.parallelism;
  const bool one_host = job.ranks <= job.ranks_per_host;
  if (p.copy_engines) {
    FLATSHARD_CHECK(
        !p.copy_engines->any() || one_host,
        config,
        "parallelism.copy_engines = {}: copies reach GPUs of one host, got {} "
        "ranks on hosts of {}; use auto or none",
        config::word_of(p.copy_engines),
        job.ranks,
        job.ranks_per_host);
    return *p.copy_engines;
  }
  const bool gathers =
      p.keep_compute_weights && !config.cuda_graph.whole_step() &&
      std::ranges::any_of(strategy.parameter, &Placement::is_shard);
  return gathers && one_host && job.ranks > 1 ? CopyEngines::all()
                                              : CopyEngines{};
}

/// Returns the memory for reductions by copies: as CopyReducer takes for each
/// group of ranks that reduces and scatters.
std::int64_t copied_gradients_nbytes(
    const std::vector<UnitShape>& units,
    std::int64_t nbytes) {
  constexpr std::int64_t kHalves = 2;
  constexpr std::int64_t kAlignment = 256;
  std::set<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
      groups;
  for (const UnitShape& unit : units) {
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) {
        continue;
      }
      const auto add = [&](auto&& chosen) {
        std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> axes;
        for (std::size_t axis = 0; axis < group.axis_sizes.size(); ++axis) {
          if (group.axis_sizes[axis] > 1 && chosen(axis)) {
            axes.first.push_back(group.axis_sizes[axis]);
            axes.second.push_back(group.axis_strides[axis]);
          }
        }
        if (!axes.first.empty()) {
          groups.insert(std::move(axes));
        }
      };
      // All at once, or the inner axes in every microbatch and the rest in the
      // last one.
      add([&](std::size_t axis) {
        return group.strategy.optimizer[axis].is_shard();
      });
      add([&](std::size_t axis) {
        return group.strategy.gradient[axis].is_shard();
      });
      add([&](std::size_t axis) {
        return group.strategy.optimizer[axis].is_shard() &&
               !group.strategy.gradient[axis].is_shard();
      });
    }
  }
  std::int64_t sum = 0;
  for (const auto& [sizes, strides] : groups) {
    std::int64_t size = 1;
    for (const std::int64_t axis : sizes) {
      size *= axis;
    }
    const std::int64_t row =
        std::max<std::int64_t>(nbytes / (kHalves * size) / kAlignment, 1) *
        kAlignment;
    sum += kHalves * size * row;
  }
  return sum;
}

/// As fully_shard.
void check_padding(const Config& config, const plan::Job& job) {
  std::vector<FlatLayout> layouts;
  for (const plan::UnitPlan& unit : plan::plan_units(job)) {
    for (const plan::GroupPlan& group : unit.groups) {
      layouts.push_back(group.layout);
    }
  }
  std::vector<const FlatLayout*> pointers;
  for (const FlatLayout& layout : layouts) {
    pointers.push_back(&layout);
  }
  if (const auto text = describe_excessive_padding(
          pointers,
          config.parallelism.max_padding)) {
    FLATSHARD_THROW(config, "{}", *text);
  }
}

/// As spend_memory_budget.
void spend_memory_budget(const Config& config, plan::Job& job) {
  const auto budget =
      static_cast<std::int64_t>(config.parallelism.memory_budget * kGiB);
  if (budget == 0) {
    return;
  }
  const auto units = plan::plan_units(job);
  std::int64_t total = 0;
  std::int64_t slots = 0;
  for (const plan::RoleBytes& row : plan::memory_of(job, units)) {
    total += row.nbytes;
    slots += row.role == "slot pool" ? row.nbytes : 0;
  }
  FLATSHARD_CHECK(
      budget >= total,
      config,
      "parallelism.memory_budget: expected at least {:.4g} GiB, which is what "
      "the memory table comes to with no unit kept, got {:g}",
      static_cast<double>(total) / kGiB,
      config.parallelism.memory_budget);
  std::vector<UnitSpec> specs;
  for (const plan::UnitPlan& unit : units) {
    specs.push_back(unit.spec);
  }
  for (const UnitId unit :
       choose_kept_units(specs, job.scheduler, slots + budget - total)) {
    job.units[unit].policy.reshard_after_forward = false;
  }
}

}  // namespace

std::shared_ptr<PlannedModel> make_planned_model(
    const Config& config,
    const models::ModelConfig& model) {
  return std::make_shared<PlannedModel>(config, model);
}

plan::Job plan_job(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t ranks,
    std::int64_t ranks_per_host,
    std::shared_ptr<PlannedModel> modules) {
  const std::int64_t tensor = config.parallelism.tensor_parallel_degree;
  const std::int64_t microbatches = config.training.global_batch_size /
                                    (config.training.local_batch_size *
                                     config.parallelism.num_data_ranks(ranks));
  plan::Job job{
      .ranks = ranks,
      .ranks_per_host = ranks_per_host,
      .scheduler = {.prefetch = static_cast<int>(config.parallelism.prefetch)},
      .microbatches = static_cast<int>(microbatches),
      .optimizer_states = config.optimizer.num_states(),
      .clips = config.training.max_norm > 0,
      .main_grads_size = element_size(config.precision.main_grads),
      .graphs = config.cuda_graph.enabled()};
  job.tensor_ranks = tensor;
  if (const std::int64_t window = tensor_window_nbytes(config, model)) {
    job.copy_activations = true;
    job.other_nbytes["shared layers"] = 2 * aligned_half(window);
  }
  ShapeMaker maker(config, model, microbatches);
  if (!modules) {
    modules = make_planned_model(config, model);
  }
  job.units = maker.make(*modules);
  job.plan_units = modules->plan_units;
  if (const auto overlap = overlap_options(config, model)) {
    job.overlap = *overlap;
    // Of a selective recompute the kernels are those of a node's backward.
    job.overlap.recompute =
        config.activation_checkpoint.mode == models::ActivationCheckpoint::full;
    // As OverlapRunner asks for.
    job.scheduler.max_grad_slots = 3;
  } else {
    job.overlap = {
        .in_flight = 1,
        .recompute = config.activation_checkpoint.mode ==
                     models::ActivationCheckpoint::full,
        .shared_experts = model.moe.shared_experts > 0};
    for (std::int64_t layer = 0; layer < model.layers; ++layer) {
      job.overlap.dense.push_back(!model.has_experts(layer));
    }
  }
  add_model_work(
      config,
      model,
      {.float8 =
           [&](std::int64_t layer, std::string_view weight) {
             return maker.recipe_of(
                 fmt::format("model.layers.{}.{}", layer, weight));
           },
       .adapted =
           [&](std::int64_t layer, std::string_view weight) {
             return modules->has_adapter(
                 fmt::format("model.layers.{}.{}", layer, weight));
           }},
      job);
  const Strategy strategy = Strategy::named(
      strategy_name(config),
      static_cast<int>(mesh_axes(config).size()));
  const CopyEngines copies = copy_engines_of(config, strategy, job);
  job.copy_forward_gathers = copies.gather();
  job.copy_backward_gathers = copies.gathers == CopyEngines::Gathers::all;
  job.copy_reductions = copies.reductions_nbytes > 0;
  if (job.copy_reductions) {
    job.other_nbytes["copied gradients"] =
        copied_gradients_nbytes(job.units, copies.reductions_nbytes);
  }
  const std::int64_t width = config.parallelism.expert_tensor_parallel_degree;
  const std::int64_t experts = config::expert_ranks(config.parallelism);
  if (experts > 1) {
    // What a rank routes of its samples' rows, to each part of an expert.
    const std::int64_t rows = config.training.local_batch_size *
                              config.training.seq_len *
                              model.moe.experts_per_token;
    const std::int64_t row = model.dim * element_size(config.precision.compute);
    job.exchange_ranks = experts;
    job.exchange_stride = width == 1 ? tensor : 1;
    job.exchange_nbytes =
        static_cast<double>(rows * row * width) / static_cast<double>(tensor);
    job.copy_exchange =
        config.parallelism.token_exchange == config::TokenExchangeKind::copies;
    if (job.copy_exchange) {
      job.other_nbytes["token exchange"] =
          2 *
          aligned_half(rows * (row + static_cast<std::int64_t>(sizeof(float))));
    }
  }
  check_padding(config, job);
  spend_memory_budget(config, job);
  return job;
}

}  // namespace flatshard
