#include "flatshard/group/weight_planes.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/group/host_memory.h"

namespace flatshard {
namespace {

// Returns whether drop_main_weights freed it, after all of it was encoded.
bool is_dropped(const FlatBuffer& main) {
  return main.local().numel() > 0 && main.local().storage().nbytes() == 0;
}

}  // namespace

WeightPlanes::WeightPlanes(const GroupContext& context)
    : context_(context),
      codec_(make_codec(context)),
      planes_(planes_of(context)) {
  const ParamGroupOptions& options = context.options;
  const Strategy& strategy = context.strategy;
  const Precision& precision = options.precision;
  const auto& mesh = context.mesh;
  const auto& layout = context.plan.layout;
  const at::ScalarType main_dtype =
      context.trainable ? precision.main_params : precision.compute;
  switch (storage().main) {
    case StoragePlan::Main::absent:
      main_ = FlatBuffer::wrap(
          at::empty(
              {FlatBuffer::local_numel(*layout, *mesh, strategy.optimizer)},
              at::TensorOptions(at::kMeta).dtype(precision.main_params)),
          layout,
          mesh,
          strategy.optimizer);
      return;
    case StoragePlan::Main::compute:
      break;
    case StoragePlan::Main::device:
      main_ = FlatBuffer(layout, mesh, strategy.optimizer, main_dtype);
      main_.local().zero_();  // padding stays zero
      break;
    case StoragePlan::Main::host:
      main_ = in_host_memory(context, strategy.optimizer, main_dtype);
      main_.local().zero_();
      break;
  }
  if (options.post_forward_ranks != 0 && !resident()) {
    post_forward_ = PostForwardShard::make(context);
  }
  for (Plane& plane : planes_) {
    if (plane.stored()) {
      allocate(plane);
      gathers_.resize(1 + plane.parts.size());
    }
  }
  if (storage().main_is_compute()) {
    // A separate version counter that only writes to main advance.
    const FlatBuffer& shard = planes_[kComputePlane].shard;
    main_ = FlatBuffer::wrap(
        shard.local().variable_data(),
        layout,
        mesh,
        shard.placements());
  }
}

void WeightPlanes::allocate(Plane& plane) const {
  const auto& mesh = context_.mesh;
  const Placements& resting = context_.strategy.parameter;
  const Placements& optimizer = context_.strategy.optimizer;
  if (!storage().rests()) {
    plane.shard = FlatBuffer::wrap(
        at::empty(
            {FlatBuffer::local_numel(*plane.layout, *mesh, resting)},
            at::TensorOptions(at::kMeta).dtype(plane.dtype)),
        plane.layout,
        mesh,
        resting);
    return;
  }
  if (context_.peers_read && !resident()) {
    plane.peers =
        std::make_unique<PeerBuffer>(plane.layout, mesh, resting, plane.dtype);
    plane.resting = plane.peers->local();
  } else {
    plane.resting = FlatBuffer(plane.layout, mesh, resting, plane.dtype);
    plane.resting.local().zero_();  // padding stays zero
  }
  if (!storage().spreads) {
    plane.shard = plane.resting;
  } else if (context_.plan.shard_is_view()) {
    plane.shard = plane.resting.redistribute(optimizer, Purpose::gather);
  } else {
    plane.shard = FlatBuffer(plane.layout, mesh, optimizer, plane.dtype);
    plane.shard.local().zero_();
  }
}

at::Tensor WeightPlanes::compute_shard() const {
  const Plane& compute = planes_[kComputePlane];
  return storage().main_is_compute() || !compute.resting.defined()
             ? at::Tensor()
             : compute.shard.local();
}

const PlaneWriter* WeightPlanes::writer() {
  const bool fits = context_.trainable && !context_.options.offload &&
                    main_.dtype() == at::kFloat;
  return fits ? codec_->writer(main_, planes_) : nullptr;
}

FlatBuffer WeightPlanes::main_on_device() const {
  if (!context_.options.offload) {
    return main_;
  }
  const at::Device device = context_.mesh->device();
  const FlatBuffer there = FlatBuffer::wrap(
      main_.local().to(device, /*non_blocking=*/true),
      context_.plan.layout,
      context_.mesh,
      main_.placements());
  if (device.is_cuda()) {
    readers_.upload_queued(*current_stream(device));
  }
  return there;
}

void WeightPlanes::use_mesh() {
  spread_.reset();
  for (auto& gather : gathers_) {
    gather.reset();
  }
  for (Plane& plane : planes_) {
    if (plane.peers != nullptr) {
      plane.peers->use_mesh(*context_.mesh);
    }
  }
}

// A fence of one plane is one of all.
const PeerBuffer* WeightPlanes::peers() const {
  for (const Plane& plane : planes_) {
    if (plane.peers != nullptr) {
      return plane.peers.get();
    }
  }
  return nullptr;
}

// -- reading ------------------------------------------------------------------

WeightPlanes::Gather WeightPlanes::plan_gather(bool from_peers) {
  const PeerBuffer* const peers = from_peers ? this->peers() : nullptr;
  const GatherProgress::Step step = progress_.next(peers != nullptr);
  if (peers != nullptr) {
    readers_.peers_copy(*peers);
  }
  plan_ways();
  return {
      .is_first = step.is_first,
      .refresh = has_refresh() && step.is_first && !is_dropped(main_),
      .encoded = step.encoded ? writer() : nullptr,
      .from_peers = peers != nullptr,
      .fence = step.is_first_copy};
}

void WeightPlanes::gather(
    PlaneId id,
    PartId part,
    const at::Tensor& out,
    const Gather& gather) {
  if (gather.refresh) {
    refresh(gather.encoded);
  }
  if (resident()) {
    return;
  }
  const Plane& plane = planes_[id];
  const PlanePart& at = plane.part(part);
  if (gather.fence) {
    peers()->fence();
  }
  if (gather.from_peers) {
    plane.peers->copy_segments(at.first_segment, at.num_segments, out);
    return;
  }
  const Redistribution& way = way_of(plane, part);
  const Placements& sharded = context_.strategy.parameter;
  if (plane.resting.defined()) {
    const at::Tensor& all = plane.resting.local();
    const LocalRange& first = plane.resting.local_ranges()[at.first_segment];
    way.run(
        part == kWhole ? all
                       : all.narrow(0, first.local_offset, way.from_numel()),
        out);
    return;
  }
  if (way.is_identity()) {
    codec_->encode(plane, part, main_on_device(), out);
    return;
  }
  // This rank's slice of the slot when that is one range, else a temporary.
  const FlatBuffer target =
      FlatBuffer::wrap(out, at.layout, context_.mesh, context_.whole());
  const FlatBuffer shard = target.redistribute(sharded, Purpose::gather);
  codec_->encode(plane, part, main_on_device(), shard.local());
  way.run(shard.local(), out);
}

void WeightPlanes::refresh(const PlaneWriter* encoded) {
  const bool encodes = storage().encodes;
  FlatBuffer main;
  if (encodes) {
    main = main_on_device();
    codec_->begin(main, encoded);
  }
  for (const Plane& plane : planes_) {
    if (!plane.stored() || !storage().rests()) {
      continue;
    }
    if (encodes) {
      codec_->encode(plane, kWhole, main, plane.shard.local());
    }
    if (storage().spreads) {
      spread_->run(plane.shard.local(), plane.resting.local());
    }
  }
  if (encodes) {
    codec_->end(main, /*all_encoded=*/storage().rests());
  }
}

void WeightPlanes::derive(
    PlaneId plane,
    PartId part,
    const at::Tensor& from,
    const at::Tensor& to) const {
  const Plane& derived = planes_[plane];
  codec_->derive(derived, part, planes_[derived.source], from, to);
}

// Runs on the host, not on the stream that all-gathers. A transport that needs
// a separate communicator connects its ranks.
void WeightPlanes::plan_ways() {
  codec_->plan();
  const Strategy& strategy = context_.strategy;
  for (const Plane& plane : planes_) {
    if (!plane.stored()) {
      continue;
    }
    if (storage().spreads && !spread_) {
      spread_.emplace(
          plane.layout,
          context_.mesh,
          strategy.optimizer,
          strategy.parameter,
          Purpose::gather);
    }
    if (!resident()) {
      way_of(plane, kWhole);
    }
  }
}

const Redistribution& WeightPlanes::way_of(const Plane& plane, PartId part) {
  std::optional<Redistribution>& way = gathers_.at(1 + part);
  if (!way) {
    way.emplace(
        plane.part(part).layout,
        context_.mesh,
        context_.strategy.parameter,
        context_.whole(),
        Purpose::gather);
  }
  return *way;
}

// -- writing ------------------------------------------------------------------

void WeightPlanes::encode_written() {
  const Plane& compute = planes_[kComputePlane];
  if (compute_shard().defined()) {
    codec_->encode(compute, kWhole, main_on_device(), compute.shard.local());
  }
}

void WeightPlanes::end_write(Stream& stream, Written written) {
  if (written == Written::main_to_cast) {
    stream.submit([this] { encode_written(); });
    seen_ = main_.local()._version();
  }
  progress_.advance(stream, /*encoded=*/written == Written::all);
}

bool WeightPlanes::adopt_foreign_writes() {
  if (main_.local()._version() == seen_) {
    return false;
  }
  end_write(*current_stream(context_.mesh->device()), Written::main_to_cast);
  return true;
}

WeightPlanes::Bytes WeightPlanes::nbytes() const {
  Bytes bytes{
      .main =
          storage().main_is_compute() || is_dropped(main_) ? 0 : main_.nbytes(),
      .compute = codec_->nbytes()};
  for (const Plane& plane : planes_) {
    if (!plane.resting.defined()) {
      continue;
    }
    bytes.compute += plane.resting.nbytes();
    if (!plane.shard.local().is_alias_of(plane.resting.local())) {
      bytes.compute += plane.shard.nbytes();
    }
  }
  return bytes;
}

}  // namespace flatshard
