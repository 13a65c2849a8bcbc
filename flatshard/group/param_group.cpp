#include "flatshard/group/param_group.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

std::shared_ptr<const FlatLayout> build_layout(
    const std::vector<GroupParameter>& parameters,
    std::int64_t num_shards,
    const LayoutOptions& options) {
  std::vector<TensorSpec> specs;
  for (const GroupParameter& p : parameters) {
    specs.push_back({p.names.front(), p.shape, p.granularity});
  }
  return std::make_shared<const FlatLayout>(
      FlatLayout::build(std::move(specs), num_shards, options));
}

// Whether two placements put the same elements on a rank of this mesh.
bool same_elements(const Mesh& mesh, const Placements& a, const Placements& b) {
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.axis(axis).size > 1 && a[axis] != b[axis]) {
      return false;
    }
  }
  return true;
}

bool any_sharded(const Mesh& mesh, const Placements& placements) {
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.axis(axis).size > 1 && placements[axis].is_shard()) {
      return true;
    }
  }
  return false;
}

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
    std::vector<GroupParameter> parameters,
    std::shared_ptr<Mesh> mesh,
    ParamGroupOptions options,
    const Initializer& initializer)
    : parameters_(std::move(parameters)),
      mesh_(std::move(mesh)),
      options_(std::move(options)) {
  FLATSHARD_CHECK(
      !parameters_.empty(),
      internal,
      "a group needs at least one parameter");
  if (options_.trainable) {
    options_.precision.validate();
  }
  FLATSHARD_CHECK(
      options_.grad_divisor > 0,
      config,
      "expected grad_divisor > 0, got {}",
      options_.grad_divisor);
  FLATSHARD_CHECK(
      !options_.peers_read_weights || options_.keep_compute_weights,
      config,
      "peers can only read compute weights that are kept; choose one of "
      "copy_gathers and keep_compute_weights = false");
  // Their optimizers' updates wait for nothing on the GPU, so a gradient in
  // main_grads is what they read.
  options_.narrow_grads = options_.narrow_grads && !options_.offload;
  FLATSHARD_CHECK(
      options_.strategy.num_axes() == mesh_->num_axes(),
      config,
      "strategy {} is for {} mesh axes, the mesh {} has {}",
      options_.strategy.name,
      options_.strategy.num_axes(),
      mesh_->to_string(),
      mesh_->num_axes());
  FLATSHARD_CHECK(
      !options_.strategy.post_forward ||
          *options_.strategy.post_forward == options_.strategy.parameter,
      config,
      "strategy.post_forward other than the parameter's placement is not "
      "supported; use reshard_after_forward");
  options_.strategy = with_reduce_op(
      options_.strategy,
      options_.scaling == GradScaling::mean ? ReduceOp::avg : ReduceOp::sum);
  options_.strategy.validate();

  const Strategy& strategy = options_.strategy;
  layout_ = build_layout(
      parameters_,
      strategy.num_shards(mesh_->axis_sizes()),
      options_.layout);

  allocate_weights();
  initialize(initializer);
}

void ParamGroup::allocate_weights() {
  const Strategy& strategy = options_.strategy;
  const Precision& precision = options_.precision;
  resident_ = !any_sharded(*mesh_, strategy.parameter);
  has_refresh_ = options_.trainable &&
                 !same_elements(*mesh_, strategy.parameter, strategy.optimizer);
  const at::ScalarType main_dtype =
      options_.trainable ? precision.main_params : precision.compute;
  main_is_compute_ = !options_.offload && main_dtype == precision.compute;
  if (!main_is_compute_) {
    allocate(main_, strategy.optimizer, main_dtype, options_.offload);
    main_.local().zero_();  // padding stays zero
  }
  if (!options_.keep_compute_weights && !main_is_compute_ && !resident_ &&
      !has_refresh_) {
    return;
  }
  if (options_.peers_read_weights && !resident_) {
    peers_ = std::make_unique<PeerBuffer>(
        layout_,
        mesh_,
        strategy.parameter,
        precision.compute);
    compute_ = peers_->local();
  } else {
    compute_ =
        FlatBuffer(layout_, mesh_, strategy.parameter, precision.compute);
    compute_.local().zero_();
  }
  if (!has_refresh_) {
    compute_shard_ = compute_;
  } else if (layout_->segments().size() == 1) {
    compute_shard_ = compute_.redistribute(strategy.optimizer, Purpose::gather);
  } else {
    compute_shard_ =
        FlatBuffer(layout_, mesh_, strategy.optimizer, precision.compute);
    compute_shard_.local().zero_();
  }
  if (main_is_compute_) {
    // A version counter of its own, which only writes to main move.
    main_ = FlatBuffer::wrap(
        compute_shard_.local().variable_data(),
        layout_,
        mesh_,
        compute_shard_.placements());
  }
}

void ParamGroup::allocate(
    FlatBuffer& buffer,
    const Placements& placements,
    at::ScalarType dtype,
    bool on_host) {
  if (buffer.defined()) {
    return;
  }
  if (!on_host) {
    buffer = FlatBuffer(layout_, mesh_, placements, dtype);
    return;
  }
  const std::int64_t numel =
      FlatBuffer::local_numel(*layout_, *mesh_, placements);
  const at::Tensor memory = host_buffer(
      numel * static_cast<std::int64_t>(c10::elementSize(dtype)),
      options_.pin_memory ? mesh_->device() : at::Device(at::kCPU));
  buffer = FlatBuffer::wrap(memory.view(dtype), layout_, mesh_, placements);
}

void ParamGroup::initialize(const Initializer& initializer) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    GroupParameter& p = parameters_[i];
    for (const Piece& piece : main_.local_pieces(i)) {
      if (piece.numel == 0) {
        continue;
      }
      const at::Tensor out =
          main_.local().narrow(0, piece.local_offset, piece.numel);
      if (p.values.defined()) {
        out.copy_(
            p.values.flatten().narrow(0, piece.tensor_offset, piece.numel));
      } else {
        initializer.fill(out, p.names.front(), p.init, piece.tensor_offset);
      }
    }
    p.values = at::Tensor();
  }
  cast_main_to_compute();
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
      options_.name,
      divisor);
  options_.scaling = GradScaling::sum;
  options_.grad_divisor = divisor;
  options_.strategy = with_reduce_op(options_.strategy, ReduceOp::sum);
  ways_ = {};  // they had the mean
}

void ParamGroup::set_attribute(
    std::int64_t parameter,
    std::string key,
    std::string value) {
  parameters_.at(parameter).attributes[std::move(key)] = std::move(value);
}

at::Tensor ParamGroup::compute_shard() const {
  return main_is_compute_ ? at::Tensor() : compute_shard_.local();
}

ParamGroup::Gather ParamGroup::plan_gather(bool copies) {
  Gather gather;
  gather.is_first = gathered_ != generation_;
  gather.refresh = has_refresh_ && gather.is_first;
  gathered_ = generation_;
  gather.copies = copies && peers_ != nullptr;
  if (gather.copies) {
    gather.fence = fenced_ != generation_;
    fenced_ = generation_;
    copied_ = true;
  }
  return gather;
}

void ParamGroup::gather(const at::Tensor& out, const Gather& gather) {
  if (gather.refresh) {
    compute_shard_.redistribute(
        options_.strategy.parameter,
        Purpose::gather,
        &compute_);
  }
  if (resident_) {
    return;
  }
  if (gather.fence) {
    peers_->fence();
  }
  if (gather.copies) {
    peers_->copy_whole(out);
  } else {
    unshard(out);
  }
}

void ParamGroup::unshard(const at::Tensor& out) const {
  if (compute_.defined()) {
    way(Way::gather).run(compute_.local(), out);
    return;
  }
  // This rank's slice of the slot when that is one range, else a temporary.
  const Placements whole(mesh_->num_axes(), Placement::replicate());
  const FlatBuffer target = FlatBuffer::wrap(out, layout_, mesh_, whole);
  const FlatBuffer shard =
      target.redistribute(options_.strategy.parameter, Purpose::gather);
  shard.local().copy_(main_on_device().local());
  way(Way::gather).run(shard.local(), out);
}

const Redistribution& ParamGroup::way(Way which) const {
  auto& planned = ways_.at(static_cast<std::size_t>(which));
  if (planned) {
    return *planned;
  }
  const Strategy& strategy = options_.strategy;
  const auto plan = [&](const Placements& from,
                        const Placements& to,
                        Purpose purpose) -> const Redistribution& {
    return planned.emplace(layout_, mesh_, from, to, purpose);
  };
  switch (which) {
    case Way::to_inner:
      return plan(partial_everywhere(), strategy.gradient, Purpose::reduce);
    case Way::inner_to_final:
      return plan(strategy.gradient, final_gradient(), Purpose::reduce);
    case Way::to_final:
      return plan(partial_everywhere(), final_gradient(), Purpose::reduce);
    case Way::gather:
    case Way::count:
      break;
  }
  return plan(
      strategy.parameter,
      Placements(mesh_->num_axes(), Placement::replicate()),
      Purpose::gather);
}

FlatBuffer ParamGroup::main_on_device() const {
  if (!options_.offload) {
    return main_;
  }
  const at::Device device = mesh_->device();
  const FlatBuffer there = FlatBuffer::wrap(
      main_.local().to(device, /*non_blocking=*/true),
      layout_,
      mesh_,
      main_.placements());
  if (device.is_cuda()) {
    uploaded_.record(*current_stream(device));
  }
  return there;
}

void ParamGroup::update_compute() {
  if (compute_shard().defined()) {
    const at::NoGradGuard no_grad;
    compute_shard_.local().copy_(main_on_device().local());
  }
}

void ParamGroup::cast_main_to_compute() {
  update_compute();
  main_version_ = main_.local()._version();
  mark_weights_changed();
}

void ParamGroup::prepare_write() {
  wait_for_uploads();
  if (copied_) {
    copied_ = false;
    current_stream(mesh_->device())->submit([this] { peers_->fence_writes(); });
  }
}

void ParamGroup::mark_weights_changed() {
  mark_weights_changed(*current_stream(mesh_->device()));
}

void ParamGroup::mark_weights_changed(Stream& stream) {
  ++generation_;
  written_.record(stream);
}

bool ParamGroup::adopt_foreign_writes() {
  if (main_.local()._version() == main_version_) {
    return false;
  }
  cast_main_to_compute();
  return true;
}

std::int64_t ParamGroup::num_replicas() const {
  std::int64_t replicas = 1;
  for (int axis = 0; axis < mesh_->num_axes(); ++axis) {
    if (!main_.placements()[axis].is_shard()) {
      replicas *= mesh_->axis(axis).size;
    }
  }
  return replicas;
}

std::vector<NamedShard> ParamGroup::main_shards() const {
  return shards_of(main_.local());
}

std::vector<NamedShard> ParamGroup::shards_of(const at::Tensor& flat) const {
  FLATSHARD_CHECK(
      flat.numel() == main_.local().numel(),
      usage,
      "expected a flat tensor of {} elements like the main weights of {}, "
      "got {}",
      main_.local().numel(),
      options_.name,
      flat.numel());
  std::vector<NamedShard> shards;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const GroupParameter& p = parameters_[i];
    const auto pieces = main_.local_pieces(i);
    for (const Piece& piece : pieces) {
      shards.push_back(
          {p.names,
           p.shape,
           piece.tensor_offset,
           piece.local_offset,
           flat.narrow(0, piece.local_offset, piece.numel),
           p.attributes});
    }
    if (pieces.empty()) {
      shards.push_back(
          {p.names, p.shape, 0, 0, flat.narrow(0, 0, 0), p.attributes});
    }
  }
  return shards;
}

ParamGroup::Bytes ParamGroup::nbytes() const {
  const auto of = [](const FlatBuffer& b) {
    return b.defined() ? b.nbytes() : 0;
  };
  std::int64_t compute = of(compute_);  // none when it is not kept
  if (compute_shard_.defined() &&
      compute_shard_.local().storage().unsafeGetStorageImpl() !=
          compute_.local().storage().unsafeGetStorageImpl()) {
    compute += of(compute_shard_);
  }
  std::int64_t lent = 0;
  if (lent_) {
    if (const at::Tensor memory(lent_->lock()); memory.defined()) {
      lent = static_cast<std::int64_t>(memory.nbytes());
    }
  }
  return {
      .main = main_is_compute_ ? 0 : of(main_),
      .compute = compute,
      .grad = of(grad_) + of(narrow_) + lent,
      .inner = of(inner_),
      .local = of(local_)};
}

}  // namespace flatshard
