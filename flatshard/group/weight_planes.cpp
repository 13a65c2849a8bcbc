#include "flatshard/group/weight_planes.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/group/host_memory.h"
#include "flatshard/layout/local_range.h"

namespace flatshard {
namespace {

// Whether two placements put the same elements on a rank of this mesh.
bool same_elements(const Mesh& mesh, const Placements& a, const Placements& b) {
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (mesh.axis(axis).size > 1 && a[axis] != b[axis]) {
      return false;
    }
  }
  return true;
}

// Whether a rank of this mesh has less than all. Weights that are made for each
// gather (see keep_compute_weights) do not rest on a single rank either.
bool any_sharded(
    const Mesh& mesh,
    const Placements& placements,
    bool made_for_gathers) {
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if ((mesh.axis(axis).size > 1 || made_for_gathers) &&
        placements[axis].is_shard()) {
      return true;
    }
  }
  return false;
}

}  // namespace

WeightPlanes::WeightPlanes(const GroupContext& context) : context_(context) {
  const ParamGroupOptions& options = context.options;
  const Strategy& strategy = context.strategy;
  const Precision& precision = options.precision;
  const auto& mesh = context.mesh;
  const auto& layout = context.layout;
  if (!options.has_weights) {
    main_is_compute_ = true;
    const std::int64_t numel =
        local_numel(*layout, strategy.optimizer, mesh->axis_sizes());
    main_ = FlatBuffer::wrap(
        at::empty(
            {numel},
            at::TensorOptions(at::kMeta).dtype(precision.main_params)),
        layout,
        mesh,
        strategy.optimizer);
    return;
  }
  has_refresh_ =
      options.float8 ||
      (context.trainable &&
       !same_elements(*mesh, strategy.parameter, strategy.optimizer));
  const at::ScalarType main_dtype =
      context.trainable ? precision.main_params : precision.compute;
  main_is_compute_ =
      !options.offload && !options.float8 && main_dtype == precision.compute;
  const bool made_for_gathers =
      !options.keep_compute_weights && !options.keep_whole_compute_weights &&
      !main_is_compute_ &&
      same_elements(*mesh, strategy.parameter, strategy.optimizer);
  resident_ = !any_sharded(*mesh, strategy.parameter, made_for_gathers);
  if (!main_is_compute_) {
    main_ = options.offload
                ? in_host_memory(context, strategy.optimizer, main_dtype)
                : FlatBuffer(layout, mesh, strategy.optimizer, main_dtype);
    main_.local().zero_();  // padding stays zero
  }
  if (options.post_forward_ranks != 0 && !resident_) {
    post_forward_ = PostForwardShard::make(context);
  }
  if (options.float8) {
    float8_ = std::make_unique<Float8Planes>(
        context,
        Float8Planes::Options{
            .resident = resident_,
            .rests =
                options.keep_compute_weights || resident_ ||
                !same_elements(*mesh, strategy.parameter, strategy.optimizer),
            .peers = context.copy_engines && !resident_});
    return;
  }
  if (!options.keep_compute_weights && !main_is_compute_ && !resident_ &&
      !has_refresh_) {
    return;
  }
  if (context.copy_engines && !resident_) {
    peers_ = std::make_unique<PeerBuffer>(
        layout,
        mesh,
        strategy.parameter,
        precision.compute);
    compute_ = peers_->local();
  } else {
    compute_ = FlatBuffer(layout, mesh, strategy.parameter, precision.compute);
    compute_.local().zero_();
  }
  if (!has_refresh_) {
    compute_shard_ = compute_;
  } else if (layout->segments().size() == 1) {
    compute_shard_ = compute_.redistribute(strategy.optimizer, Purpose::gather);
  } else {
    compute_shard_ =
        FlatBuffer(layout, mesh, strategy.optimizer, precision.compute);
    compute_shard_.local().zero_();
  }
  if (main_is_compute_) {
    // A version counter of its own, which only writes to main move.
    main_ = FlatBuffer::wrap(
        compute_shard_.local().variable_data(),
        layout,
        mesh,
        compute_shard_.placements());
  }
}

std::vector<WeightPlane> WeightPlanes::planes() const {
  const Precision& precision = context_.options.precision;
  const WeightPlane compute{
      .name = "compute",
      .origin = WeightPlane::Origin::derived,
      .dtype = precision.compute,
      .data = &compute_};
  if (float8_ != nullptr) {
    std::vector<WeightPlane> planes{
        {.name = context_.trainable ? "main" : "compute",
         .dtype = main_.dtype(),
         .data = &main_},
        {.name = "rows",
         .origin = WeightPlane::Origin::derived,
         .dtype = at::kFloat8_e4m3fn,
         .data = &float8_->stored(Float8Planes::kRows)}};
    if (float8_->stores(Float8Planes::kColumns)) {
      planes.push_back(planes.back());
      planes.back().name = "columns";
      planes.back().data = &float8_->stored(Float8Planes::kColumns);
    }
    return planes;
  }
  if (!context_.trainable) {
    return {
        {.name = "compute",
         .dtype = precision.compute,
         .data = compute_.defined() ? &compute_ : &main_}};
  }
  return {
      {.name = "main", .dtype = precision.main_params, .data = &main_},
      compute};
}

at::Tensor WeightPlanes::compute_shard() const {
  return main_is_compute_ ? at::Tensor() : compute_shard_.local();
}

const Float8Outputs* WeightPlanes::float8_outputs() {
  const bool fits = float8_ != nullptr && context_.trainable &&
                    !context_.options.offload && main_.dtype() == at::kFloat;
  return fits ? float8_->outputs(main_) : nullptr;
}

FlatBuffer WeightPlanes::main_on_device() const {
  if (!context_.options.offload) {
    return main_;
  }
  const at::Device device = context_.mesh->device();
  const FlatBuffer there = FlatBuffer::wrap(
      main_.local().to(device, /*non_blocking=*/true),
      context_.layout,
      context_.mesh,
      main_.placements());
  if (device.is_cuda()) {
    readers_.upload_queued(*current_stream(device));
  }
  return there;
}

void WeightPlanes::use_mesh() {
  refresh_.reset();
  gather_.reset();
  if (float8_ != nullptr) {
    float8_->use_mesh();
  }
  if (peers_ != nullptr) {
    peers_->use_mesh(*context_.mesh);
  }
}

const PeerBuffer* WeightPlanes::peers() const {
  return float8_ != nullptr ? float8_->peers() : peers_.get();
}

// -- reading ------------------------------------------------------------------

WeightPlanes::Gather WeightPlanes::plan_gather(bool copy_engines) {
  const PeerBuffer* const peers = copy_engines ? this->peers() : nullptr;
  const GatherProgress::Step step = progress_.next(peers != nullptr);
  if (peers != nullptr) {
    readers_.peers_copy(*peers);
  }
  plan_ways();
  return {
      .is_first = step.is_first,
      .refresh = has_refresh_ && step.is_first,
      .float8_begun = step.float8_begun,
      .copy_engines = peers != nullptr,
      .fence = step.is_first_copy};
}

void WeightPlanes::gather(const at::Tensor& out, const Gather& gather) {
  if (gather.refresh) {
    refresh_->run(compute_shard_.local(), compute_.local());
  }
  if (resident_) {
    return;
  }
  if (gather.fence) {
    peers_->fence();
  }
  if (gather.copy_engines) {
    peers_->copy_whole(out);
  } else {
    unshard(out);
  }
}

void WeightPlanes::gather(
    Float8Planes::Plane plane,
    int part,
    const at::Tensor& out,
    const Gather& gather) {
  if (gather.refresh) {
    float8_->refresh(main_on_device(), gather.float8_begun);
  }
  if (resident_) {
    return;
  }
  if (gather.fence) {
    float8_->peers()->fence();
  }
  if (gather.copy_engines) {
    float8_->copy(plane, part, out);
  } else if (float8_->rests()) {
    float8_->gather(plane, part, out);
  } else {
    float8_->gather_made(main_on_device(), plane, part, out);
  }
}

// On the host, and not on the stream that gathers: a way that needs a
// communicator of its own connects its ranks.
void WeightPlanes::plan_ways() {
  if (float8_ != nullptr) {
    float8_->plan_ways();
    return;
  }
  const Strategy& strategy = context_.strategy;
  if (has_refresh_ && !refresh_) {
    refresh_.emplace(
        context_.layout,
        context_.mesh,
        strategy.optimizer,
        strategy.parameter,
        Purpose::gather);
  }
  if (!resident_ && !gather_) {
    gather_.emplace(
        context_.layout,
        context_.mesh,
        strategy.parameter,
        context_.whole(),
        Purpose::gather);
  }
}

void WeightPlanes::unshard(const at::Tensor& out) {
  const Placements& resting = context_.strategy.parameter;
  if (compute_.defined()) {
    gather_->run(compute_.local(), out);
    return;
  }
  // This rank's slice of the slot when that is one range, else a temporary.
  const FlatBuffer target =
      FlatBuffer::wrap(out, context_.layout, context_.mesh, context_.whole());
  const FlatBuffer shard = target.redistribute(resting, Purpose::gather);
  shard.local().copy_(main_on_device().local());
  gather_->run(shard.local(), out);
}

// -- writing ------------------------------------------------------------------

void WeightPlanes::cast() {
  if (compute_shard().defined()) {
    const at::NoGradGuard no_grad;
    compute_shard_.local().copy_(main_on_device().local());
  }
}

void WeightPlanes::end_write(Stream& stream, Written written) {
  if (written == Written::main_to_cast) {
    stream.submit([this] { cast(); });
    seen_ = main_.local()._version();
  }
  progress_.advance(stream, /*float8_begun=*/written == Written::all);
}

bool WeightPlanes::adopt_foreign_writes() {
  if (main_.local()._version() == seen_) {
    return false;
  }
  end_write(*current_stream(context_.mesh->device()), Written::main_to_cast);
  return true;
}

WeightPlanes::Bytes WeightPlanes::nbytes() const {
  std::int64_t compute = compute_.nbytes();  // none when it is not kept
  if (float8_ != nullptr) {
    compute += float8_->nbytes();
  }
  if (compute_shard_.defined() &&
      compute_shard_.local().storage().unsafeGetStorageImpl() !=
          compute_.local().storage().unsafeGetStorageImpl()) {
    compute += compute_shard_.nbytes();
  }
  return {.main = main_is_compute_ ? 0 : main_.nbytes(), .compute = compute};
}

}  // namespace flatshard
