// The part of the Executor that unshards weights and later frees their slots.
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/runtime/executor.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace flatshard {
namespace {

/// Returns the communicators that an all-gather of `unit` may use.
std::vector<Communicator*> gather_communicators(const Unit& unit) {
  std::vector<Communicator*> all;
  const Mesh* last = nullptr;
  for (const auto& group : unit.groups()) {
    const Mesh* const mesh = group->model_mesh().get();
    if (mesh != last) {
      const auto own = mesh->communicators(Purpose::gather);
      all.insert(all.end(), own.begin(), own.end());
    }
    last = mesh;
  }
  return all;
}

}  // namespace

SlotView Executor::acquire_weights(
    Unit& unit,
    const Action& action,
    const std::shared_ptr<Stream>& filler) {
  if (unit.weights().rests(action.plane)) {
    return {};
  }
  const SlotKey key{
      .unit = unit.id(),
      .plane = action.plane,
      .role = action.phase == Phase::forward ? SlotRole::forward_weights
                                             : SlotRole::backward_weights,
      .part = action.part};
  Slot& slot = weight_slot(unit, action.plane, action.part).slot;
  slots_.acquire(
      unit,
      key,
      unit.weights().nbytes(action.plane, action.part),
      filler,
      slot);
  return view(slot);
}

void Executor::gather(Unit& unit, const Action& action) {
  // A program that unshards may write next, and no forward or backward fences
  // that write.
  const CopyEngines::Gathers asked = options_.copy_engines.gathers;
  const bool from_peers = !(action.by_program && options_.foreign_writes) &&
                          (asked == CopyEngines::Gathers::all ||
                           (asked == CopyEngines::Gathers::forward &&
                            action.phase == Phase::forward));
  WeightSlot* shards = nullptr;
  if (action.from_post_forward) {
    shards = &weight_slot(unit, unit.weights().planes().post_forward, kWhole);
    shards->filled.wait(*streams_->gather());
  }
  std::vector<WeightPlanes::Gather> gathers;
  gathers.reserve(unit.groups().size());
  for (const auto& group : unit.groups()) {
    gathers.emplace_back();
    if (group->weights().has(action.plane) &&
        !(shards != nullptr && group->weights().post_forward() != nullptr)) {
      gathers.back() = group->weights().plan_gather(from_peers);
      if (gathers.back().is_first) {
        group->weights().progress().wait(*streams_->gather());
      }
    }
  }
  const SlotView slot = acquire_weights(unit, action, streams_->gather());
  queue_collectives(
      *streams_->gather(),
      gather_communicators(unit),
      [&unit,
       slot,
       gathers = std::move(gathers),
       plane = action.plane,
       part = action.part,
       from = shards == nullptr ? SlotView() : view(shards->slot),
       step = step_] {
        const CollectiveScope scope(step, unit.name());
        unit.weights().gather_into(slot, plane, part, gathers, from);
      });
  weight_slot(unit, action.plane, action.part)
      .filled.record(*streams_->gather());
  if (shards != nullptr) {
    shards->read_by_gather.record(*streams_->gather());
  }
}

void Executor::derive(Unit& unit, const Action& action) {
  if (action.plane == unit.weights().planes().post_forward) {
    save_post_forward(unit, action);
    return;
  }
  WeightSlot& source = weight_slot(
      unit,
      unit.weights().planes().derived_from[action.plane],
      action.part);
  const SlotView slot = acquire_weights(unit, action, streams_->gather());
  streams_->gather()->submit([&unit,
                              slot,
                              plane = action.plane,
                              part = action.part,
                              source = view(source.slot)] {
    unit.weights().derive_into(slot, plane, part, source);
  });
  source.read_by_gather.record(*streams_->gather());
  weight_slot(unit, action.plane, action.part)
      .filled.record(*streams_->gather());
}

// On compute: it has the weights until now and may have written them.
void Executor::save_post_forward(Unit& unit, const Action& action) {
  const auto compute = streams_->compute();
  const SlotView shards = acquire_weights(unit, action, compute);
  unit.weights().save_post_forward(
      view(weight_slot(unit, kComputePlane, kWhole).slot),
      shards);
  weight_slot(unit, action.plane, kWhole).filled.record(*compute);
}

void Executor::release_post_forward(Unit& unit) {
  WeightSlot& held =
      weight_slot(unit, unit.weights().planes().post_forward, kWhole);
  const auto compute = streams_->compute();
  const bool tells_unused = observers_.want_unused_slots();
  observers_.slots.tell(
      [&](SlotObserver& o) { o.slot_released(unit, held.slot); });
  Event last_use = std::exchange(held.read_by_gather, {});
  const bool was_read = last_use.recorded();
  if (tells_unused) {
    if (was_read) {
      last_use.wait(*compute);
    }
    tell_unused(view(held.slot));
  }
  if (tells_unused || !was_read) {
    last_use = {};
    last_use.record(*compute);
  }
  slots_.release(held.slot, last_use, compute);
}

void Executor::await(Unit& unit, const Action& action) {
  WeightSlot& held = weight_slot(unit, action.plane, action.part);
  streams_->compute_waits(held.filled);
  held.awaited = true;
  if (action.plane != kComputePlane) {
    return;  // layers ask for it
  }
  const SlotView slot = view(held.slot);
  unit.pointers().point_at(slot);
  observers_.slots.tell(
      [&](SlotObserver& o) { o.parameters_pointed(unit, slot); });
}

void Executor::release(Unit& unit, const Action& action) {
  if (action.plane == unit.weights().planes().post_forward) {
    release_post_forward(unit);
    return;
  }
  WeightSlot& held = weight_slot(unit, action.plane, action.part);
  if (action.plane == kComputePlane) {
    unit.pointers().check_not_shared();
    unit.pointers().clear();
    observers_.slots.tell([&](SlotObserver& o) { o.parameters_cleared(unit); });
  }
  const auto stream = streams_->compute();
  const bool staged = held.read_by_gather.recorded();
  const bool tells_unused = observers_.want_unused_slots();
  if (!held.awaited && (!staged || tells_unused)) {
    held.filled.wait(*stream);  // a prefetch that was not used
  }
  observers_.slots.tell(
      [&](SlotObserver& o) { o.slot_released(unit, held.slot); });
  if (tells_unused) {
    if (staged) {
      held.read_by_gather.wait(*stream);
    }
    tell_unused(view(held.slot));
  }
  Event last_use;
  last_use.record(*stream);
  if (staged) {
    // The gather stream read it as well, and compute need not wait for that.
    if (held.awaited || tells_unused) {
      last_use.wait(*streams_->gather());
    }
    last_use = {};
    last_use.record(*streams_->gather());
  }
  slots_.release(held.slot, last_use, streams_->gather());
  held.awaited = false;
  held.read_by_gather = {};
}

PlaneView Executor::awaited(
    const Unit& unit,
    const UnitParameter& p,
    PlaneId plane) const {
  const std::vector<WeightSlot>& slices = states_[unit.id()].weights;
  for (const PartId part : {kWhole, unit.weights().part_of(p)}) {
    const WeightSlot& held = slices[unit.weights().planes().slice(plane, part)];
    if (held.awaited) {
      return unit.weights().view(p, plane, part, view(held.slot));
    }
  }
  FLATSHARD_THROW(
      internal,
      "parameter {} of unit {}: plane {} was asked for and is not there",
      p.name,
      unit.name(),
      plane);
}

}  // namespace flatshard
