#include "flatshard/group/param_group.h"

#include "flatshard/core/error.h"

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

std::vector<std::int64_t> axis_sizes(const Mesh& mesh) {
  std::vector<std::int64_t> sizes;
  for (const MeshAxis& axis : mesh.axes()) {
    sizes.push_back(axis.size);
  }
  return sizes;
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

void sum_or_set(const at::Tensor& into, const at::Tensor& from, bool add) {
  if (add) {
    into.add_(from);
  } else {
    into.copy_(from);
  }
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
  options_.precision.validate();
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
  const auto sizes = axis_sizes(*mesh_);
  layout_ =
      build_layout(parameters_, strategy.num_shards(sizes), options_.layout);

  allocate_weights();
  initialize(initializer);
}

void ParamGroup::allocate_weights() {
  const Strategy& strategy = options_.strategy;
  const Precision& precision = options_.precision;
  resident_ = !any_sharded(*mesh_, strategy.parameter);
  has_refresh_ = options_.trainable &&
                 !same_elements(*mesh_, strategy.parameter, strategy.optimizer);
  main_is_compute_ =
      !options_.trainable || precision.main_params == precision.compute;
  if (!main_is_compute_) {
    main_ =
        FlatBuffer(layout_, mesh_, strategy.optimizer, precision.main_params);
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
  gather.refresh = has_refresh_ && refreshed_ != generation_;
  refreshed_ = generation_;
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
  const Placements whole(mesh_->num_axes(), Placement::replicate());
  const FlatBuffer target = FlatBuffer::wrap(out, layout_, mesh_, whole);
  if (compute_.defined()) {
    compute_.redistribute(whole, Purpose::gather, &target);
    return;
  }
  // This rank's slice of the slot when that is one range, else a temporary.
  const FlatBuffer shard =
      target.redistribute(options_.strategy.parameter, Purpose::gather);
  shard.local().copy_(main_.local());
  shard.redistribute(whole, Purpose::gather, &target);
}

void ParamGroup::cast_main_to_compute() {
  if (compute_shard().defined()) {
    const at::NoGradGuard no_grad;
    compute_shard_.local().copy_(main_.local());
  }
  main_version_ = main_.local()._version();
  mark_weights_changed();
}

void ParamGroup::prepare_write() {
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

Placements ParamGroup::partial_everywhere() const {
  const ReduceOp op =
      options_.scaling == GradScaling::mean ? ReduceOp::avg : ReduceOp::sum;
  return Placements(mesh_->num_axes(), Placement::partial(op));
}

Placements ParamGroup::final_gradient() const {
  return options_.strategy.optimizer;  // Shard or Replicate, never Partial
}

FlatBuffer ParamGroup::wrap_partial(const at::Tensor& local) const {
  return FlatBuffer::wrap(local, layout_, mesh_, partial_everywhere());
}

ParamGroup::Reduction ParamGroup::plan_reduction(
    bool collective,
    bool is_last) {
  Reduction r{.collective = collective};
  r.add_local = has_local_;
  if (!collective) {
    has_local_ = true;
    allocate(local_, partial_everywhere(), options_.precision.main_grads);
    return r;
  }
  has_local_ = false;
  copied_ = false;  // every rank's gradient needed its copies
  const Placements& rest = options_.strategy.gradient;
  const bool has_partial =
      std::any_of(rest.begin(), rest.end(), [](const Placement& p) {
        return p.is_partial();
      });
  r.add_inner = has_inner_;
  r.to_inner = has_partial && !is_last;
  if (r.to_inner || r.add_inner) {
    allocate(inner_, options_.strategy.gradient, options_.precision.main_grads);
  }
  if (r.to_inner) {
    has_inner_ = true;
    return r;
  }
  has_inner_ = false;
  r.add_grad = has_grad_;
  has_grad_ = true;
  const Precision& precision = options_.precision;
  const bool narrow = is_last && !r.add_grad && can_stay_narrow();
  r.widen = r.add_grad && grad_.local().scalar_type() != precision.main_grads;
  if (r.widen) {
    narrow_ = std::exchange(grad_, {});
  }
  allocate(
      grad_,
      final_gradient(),
      narrow ? precision.reduce : precision.main_grads);
  return r;
}

bool ParamGroup::can_stay_narrow() const {
  return options_.narrow_grads && options_.grad_divisor == 1;
}

void ParamGroup::allocate(
    FlatBuffer& buffer,
    const Placements& placements,
    at::ScalarType dtype) {
  if (!buffer.defined()) {
    buffer = FlatBuffer(layout_, mesh_, placements, dtype);
  }
}

void ParamGroup::reduce(const at::Tensor& slot, const Reduction& r) {
  const Strategy& strategy = options_.strategy;
  const at::ScalarType wire = options_.precision.reduce;
  if (options_.scaling == GradScaling::pre_scaled) {
    slot.mul_(1.0 / mesh_->size());
  }
  FlatBuffer source = wrap_partial(slot);
  if (!r.collective) {
    sum_or_set(local_.local(), source.local(), r.add_local);
    return;
  }
  if (r.add_local) {
    local_.local().add_(source.local());
    source = wrap_partial(local_.local().to(wire));
  }
  if (r.to_inner || r.add_inner) {
    const FlatBuffer inner =
        source.redistribute(strategy.gradient, Purpose::reduce);
    sum_or_set(inner_.local(), inner.local(), r.add_inner);
    if (r.to_inner) {
      return;
    }
    source = FlatBuffer::wrap(
        inner_.local().to(wire),
        layout_,
        mesh_,
        strategy.gradient);
  }
  const Placements target = final_gradient();
  if (r.widen) {
    grad_.local().copy_(narrow_.local());
  }
  const bool direct = !r.add_grad && options_.grad_divisor == 1 &&
                      !reduced_hook_ && wire == grad_.local().scalar_type();
  if (direct) {
    source.redistribute(target, Purpose::reduce, &grad_);
    return;
  }
  const FlatBuffer reduced = source.redistribute(target, Purpose::reduce);
  if (reduced_hook_) {
    reduced_hook_(reduced.local());
  }
  if (options_.grad_divisor != 1) {
    reduced.local().div_(options_.grad_divisor);
  }
  sum_or_set(grad_.local(), reduced.local(), r.add_grad);
}

void ParamGroup::zero_grad() {
  forget_grad();
  has_inner_ = false;
  has_local_ = false;
  inner_ = {};
  local_ = {};
}

void ParamGroup::forget_grad() {
  has_grad_ = false;
  grad_ = {};
  narrow_ = {};
}

void ParamGroup::scale_gradients(double factor) {
  const at::NoGradGuard no_grad;
  if (has_grad_) {
    // A copy only when it is narrow.
    grad_ = FlatBuffer::wrap(
        grad_.local().to(options_.precision.main_grads),
        layout_,
        mesh_,
        final_gradient());
    grad_.local().mul_(factor);
  }
  if (has_inner_) {
    inner_.local().mul_(factor);
  }
  if (has_local_) {
    local_.local().mul_(factor);
  }
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
  return {
      .main = main_is_compute_ ? 0 : of(main_),
      .compute = compute,
      .grad = of(grad_) + of(narrow_),
      .inner = of(inner_),
      .local = of(local_)};
}

}  // namespace flatshard
