#include "flatshard/group/param_group.h"

#include "flatshard/core/error.h"
#include "flatshard/float8/float8_matmul.h"
#include "flatshard/group/shard_axes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

Strategy with_reduce_op(Strategy strategy, ReduceOp op) {
  for (Placement& placement : strategy.gradient) {
    if (placement.is_partial()) {
      placement = Placement::partial(op);
    }
  }
  return strategy;
}

}  // namespace

ParamGroup::ParamGroup(
    GroupSpec spec,
    ParamGroupOptions options,
    const Initializer& initializer)
    : parameters_(std::move(spec.parameters)),
      context_{
          .name = std::move(spec.name),
          .strategy = std::move(spec.strategy),
          .mesh = spec.mesh,
          .model_mesh = spec.model_mesh ? std::move(spec.model_mesh)
                                        : std::move(spec.mesh),
          .trainable = spec.trainable,
          .peers_read = spec.peers_read,
          .options = std::move(options)} {
  ParamGroupOptions& own = context_.options;
  const Strategy& strategy = context_.strategy;
  const Mesh& m = *context_.mesh;
  FLATSHARD_CHECK(
      !parameters_.empty(),
      internal,
      "a group needs at least one parameter");
  if (trainable()) {
    own.precision.validate();
  }
  check_slices();
  check_float8();
  FLATSHARD_CHECK(
      own.grad_divisor > 0,
      config,
      "expected grad_divisor > 0, got {}",
      own.grad_divisor);
  FLATSHARD_CHECK(
      !context_.peers_read || own.keep_compute_weights,
      config,
      "copy engines can only read compute weights that are kept; choose one of "
      "copy_engines and keep_compute_weights = false");
  own.grads_in_reduce_dtype = own.keeps_reduce_dtype();
  FLATSHARD_CHECK(
      strategy.num_axes() == m.num_axes(),
      config,
      "strategy {} is for {} mesh axes, the mesh {} has {}",
      strategy.name,
      strategy.num_axes(),
      m.to_string(),
      m.num_axes());
  strategy.validate();
  use_division();

  context_.parameters = &parameters_;
  context_.plan = GroupPlan(shape_of(context_));
  weights_ = std::make_unique<WeightPlanes>(context_);
  initialize(initializer);
}

void ParamGroup::check_slices() const {
  FLATSHARD_CHECK(
      mesh()->is_part_of(*model_mesh()),
      config,
      "{}: expected the model's mesh {} or a sub-mesh of it, got {}",
      name(),
      model_mesh()->to_string(),
      mesh()->to_string());
  for (const GroupParameter& p : parameters_) {
    FLATSHARD_CHECK(
        p.placement.slice.has_value() ==
            parameters_.front().placement.slice.has_value(),
        internal,
        "{}: {} is a slice and {} is not; they need groups of their own",
        name(),
        p.placement.slice ? p.names.front() : parameters_.front().names.front(),
        p.placement.slice ? parameters_.front().names.front()
                          : p.names.front());
    p.slice().check(p.shape, "parameter " + p.names.front());
    FLATSHARD_CHECK(
        p.slice().is_whole(p.shape) || !mesh()->same_as(*model_mesh()),
        config,
        "parameter {} is a slice of a larger tensor, but all ranks of the "
        "model share it; give it a sub-mesh without the axis along which it is "
        "split",
        p.names.front());
  }
}

void ParamGroup::check_float8() const {
  const ParamGroupOptions& own = context_.options;
  if (!own.float8) {
    return;
  }
  FLATSHARD_CHECK(
      own.precision.compute == at::kBFloat16,
      config,
      "{}: FP8 weights need bfloat16 compute, got precision.compute = {}",
      name(),
      c10::toString(own.precision.compute));
  const float8::Recipe recipe = own.float8->recipe;
  FLATSHARD_CHECK(
      float8::traits_of(recipe).for_weights,
      config,
      "{}: {} is for activations; use blockwise for weights",
      name(),
      float8::to_string(recipe));
  const at::Device device = mesh()->device();
  FLATSHARD_CHECK(
      device.is_cpu() || own.float8->emulate ||
          float8::multiplies(recipe, device),
      config,
      "{}: {}; use another recipe, or emulate = true (not faster than "
      "bfloat16)",
      name(),
      float8::why_not_multiplied(recipe, device));
  FLATSHARD_CHECK(
      !own.float8->stored_columns || float8::has_power_of_two_scales(recipe),
      config,
      "{}: stored_columns is not supported with {}, because its rowwise and "
      "columnwise data are the same numbers; use derived columns",
      name(),
      float8::to_string(recipe));
  for (const GroupParameter& p : parameters_) {
    const std::string why_not = own.float8->why_not(p.shape);
    FLATSHARD_CHECK(
        why_not.empty(),
        config,
        "parameter {} cannot be FP8 ({}): {}; exclude it",
        p.names.front(),
        float8::to_string(recipe),
        why_not);
  }
}

void ParamGroup::use_model_mesh(std::shared_ptr<Mesh> mesh) {
  FLATSHARD_CHECK(
      model_mesh()->same_as(*mesh),
      usage,
      "{}: expected the mesh {} with other communicators, got mesh {}",
      name(),
      model_mesh()->to_string(),
      mesh->to_string());
  context_.mesh = this->mesh()->same_as(*mesh)
                      ? mesh
                      : mesh->sub_mesh(this->mesh()->axis_names());
  context_.model_mesh = std::move(mesh);
  weights_->use_mesh();
  gradients_.replan();
}

void ParamGroup::initialize(const Initializer& initializer) {
  const at::NoGradGuard no_grad;
  const FlatBuffer& main = weights_->main();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    GroupParameter& p = parameters_[i];
    for (const Piece& piece : main.local_pieces(i)) {
      if (piece.numel == 0) {
        continue;
      }
      const at::Tensor out =
          main.local().narrow(0, piece.local_offset, piece.numel);
      if (p.values.defined()) {
        out.copy_(
            p.values.flatten().narrow(0, piece.tensor_offset, piece.numel));
      } else {
        const std::vector<std::int64_t> whole = p.whole_shape();
        std::int64_t done = 0;
        for (const Rectangle& box : p.slice().boxes(
                 p.shape,
                 piece.tensor_offset,
                 piece.tensor_offset + piece.numel)) {
          initializer.fill(
              out.narrow(0, done, box.numel()),
              p.names.front(),
              p.init,
              FlatRuns(whole, box));
          done += box.numel();
        }
      }
    }
    p.values = at::Tensor();
  }
  weights_->initialized();
}

void ParamGroup::set_names(
    std::int64_t parameter,
    std::vector<std::string> names) {
  FLATSHARD_CHECK(!names.empty(), usage, "a parameter needs a name");
  parameters_.at(parameter).names = std::move(names);
}

void ParamGroup::set_divisor(double divisor) {
  FLATSHARD_CHECK(
      divisor > 0,
      config,
      "{}: expected a gradient divisor > 0, got {}",
      name(),
      divisor);
  ParamGroupOptions& own = context_.options;
  own.scaling = GradScaling::sum;
  own.grad_divisor = divisor;
  use_division();
}

void ParamGroup::set_sums_only(bool sums_only) {
  context_.options.sums_only = sums_only;
  use_division();
}

void ParamGroup::use_division() {
  context_.strategy =
      with_reduce_op(std::move(context_.strategy), context_.division().op);
  gradients_.replan();  // the plans had another operation
}

void ParamGroup::set_part(
    std::int64_t parameter,
    TensorSlice slice,
    Replicas outside) {
  GroupParameter& p = parameters_.at(parameter);
  slice.check(p.shape, "parameter " + p.names.front());
  p.placement.slice = std::move(slice);
  p.outside = outside;
}

GradientPipeline::Reduction ParamGroup::plan_reduction(
    bool collective,
    bool is_last) {
  if (collective) {
    weights_->readers().peers_have_read();
  }
  return gradients_.plan(collective, is_last);
}

std::vector<int> shard_axes(
    const Mesh& mesh,
    const Mesh& model_mesh,
    const Placements& main,
    bool is_sliced) {
  const std::vector<std::string> own = mesh.axis_names();
  std::vector<int> axes;
  for (int axis = 0; axis < model_mesh.num_axes(); ++axis) {
    const auto found = std::ranges::find(own, model_mesh.axis(axis).name);
    if (found == own.end() ? is_sliced : main[found - own.begin()].is_shard()) {
      axes.push_back(axis);
    }
  }
  return axes;
}

std::vector<int> shard_axes(const ParamGroup& group) {
  return shard_axes(
      *group.mesh(),
      *group.model_mesh(),
      group.weights().main().placements(),
      group.parameters().front().placement.slice.has_value());
}

Replicas ParamGroup::replicas() const {
  Replicas replicas;
  const std::vector<int> sharded = shard_axes(*this);
  for (int axis = 0; axis < model_mesh()->num_axes(); ++axis) {
    if (std::ranges::find(sharded, axis) == sharded.end()) {
      const std::int64_t size = model_mesh()->axis(axis).size;
      replicas.index = replicas.index * size + model_mesh()->coordinate(axis);
      replicas.count *= size;
    }
  }
  return replicas;
}

std::vector<NamedShard> ParamGroup::main_shards() const {
  return shards_of(weights_->main().local());
}

std::vector<NamedShard> ParamGroup::shards_of(const at::Tensor& flat) const {
  FLATSHARD_CHECK(
      flat.numel() == weights_->main().local().numel(),
      usage,
      "expected a flat tensor of {} elements like the main weights of {}, "
      "got {}",
      weights_->main().local().numel(),
      name(),
      flat.numel());
  const Replicas within = replicas();
  std::vector<NamedShard> shards;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const GroupParameter& p = parameters_[i];
    auto pieces = weights_->main().local_pieces(i);
    if (pieces.empty()) {
      pieces.emplace_back();
    }
    for (const Piece& piece : pieces) {
      shards.push_back(
          {.names = p.names,
           .shape = p.shape,
           .slice = p.slice(),
           .begin = piece.tensor_offset,
           .local_offset = piece.local_offset,
           .tensor = flat.narrow(0, piece.local_offset, piece.numel),
           .attributes = p.attributes,
           .dropped = p.dropped,
           .replicas = {
               .index = p.outside.index * within.count + within.index,
               .count = p.outside.count * within.count}});
    }
  }
  return shards;
}

void check_same_encoding(
    const std::string& unit,
    const std::vector<std::unique_ptr<ParamGroup>>& groups) {
  const Float8Format* first = nullptr;
  for (const auto& group : groups) {
    const auto& format = group->options().float8;
    if (!format) {
      continue;
    }
    first = first == nullptr ? &*format : first;
    FLATSHARD_CHECK(
        *format == *first,
        config,
        "unit {}: expected one FP8 format for its weights, got {} and {}, or "
        "other options",
        unit,
        float8::to_string(first->recipe),
        float8::to_string(format->recipe));
  }
}

}  // namespace flatshard
