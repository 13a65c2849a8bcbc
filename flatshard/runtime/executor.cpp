#include "flatshard/runtime/executor.h"

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/memory.h"
#include "flatshard/runtime/model_meshes.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {
namespace {

bool has_outer_stage(const Executor::Units& units) {
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      if (group->trainable() && group->gradients().has_outer_stage()) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

Executor::Executor(
    std::shared_ptr<Mesh> mesh,
    const Units& units,
    const RuntimeObservers& observers,
    const RuntimeOptions& options)
    : mesh_(std::move(mesh)),
      units_(units),
      states_(units.size()),
      observers_(observers),
      options_(options),
      slots_(mesh_->device(), units.size(), observers, options.slots_on_demand),
      streams_(
          options.shared_streams ? options.shared_streams
                                 : std::make_shared<CommStreams>(
                                       mesh_->device(),
                                       options.streams,
                                       has_outer_stage(units))),
      kept_(
          options.offload_activations ? std::make_unique<KeptActivations>(
                                            mesh_->device(),
                                            options.streams)
                                      : nullptr) {
  for (const auto& unit : units_) {
    states_[unit->id()].weights.resize(unit->weights().planes().num_slices());
    for (const auto& group : unit->groups()) {
      offloads_ |= group->options().offload;
    }
  }
}

Executor::HeldSlots Executor::held_slots(const Unit& unit) const {
  const UnitState& held = states_[unit.id()];
  return {
      .weights = view(held.weights[kComputePlane].slot),
      .grads = view(held.grads)};
}

Executor::~Executor() {
  try {
    streams_->synchronize();
  } catch (const std::exception& e) {
    const auto meshes = model_meshes(mesh_, units_);
    // A verdict was thrown before.
    if (std::ranges::none_of(meshes, &Mesh::has_verdict)) {
      log_error("while a runtime was destroyed: {}", e.what());
    }
  }
}

void Executor::forget_queued() {
  all_reduced_ = {};
  all_outer_reduced_ = {};
  for (UnitState& state : states_) {
    for (WeightSlot& weights : state.weights) {
      weights.filled = {};
      weights.read_by_gather = {};
    }
    state.grads_read = {};
    state.reduced = {};
  }
  slots_.forget_uses();
}

void Executor::wait_for_all_written_weights() {
  const auto stream = streams_->compute();
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      group->weights().progress().wait(*stream);
    }
  }
}

void Executor::reset() {
  // A failure may have left a stream with its error, and units half way between
  // two actions. This resets everything.
  reduced_groups_.clear();
  streams_->reset();
  if (kept_ != nullptr) {
    kept_->reset();
  }
  for (const auto& mesh : model_meshes(mesh_, units_)) {
    mesh->restart_communicators();
  }
  all_reduced_ = {};
  all_outer_reduced_ = {};
  for (Drained& drained : drained_) {
    drained.last_use = {};  // it would repeat the error
  }
  release_drained();
  slots_.forget_uses();
  for (const auto& unit : units_) {
    rest(*unit);
  }
}

void Executor::execute(const Action& action) {
  try {
    switch (action.kind) {
      case ActionKind::gather:
        gather(*units_[action.unit], action);
        break;
      case ActionKind::derive:
        derive(*units_[action.unit], action);
        break;
      case ActionKind::await:
        await(*units_[action.unit], action);
        break;
      case ActionKind::release:
        release(*units_[action.unit], action);
        break;
      case ActionKind::acquire_grads:
        // On demand at the first write: else the root's slot would exist at the
        // same time as the logits.
        if (!options_.slots_on_demand &&
            units_[action.unit]->gradients().writes_in_place()) {
          grads_slot(*units_[action.unit]);
        }
        break;
      case ActionKind::reduce:
        reduce(*units_[action.unit], true, action.is_last);
        break;
      case ActionKind::accumulate:
        reduce(*units_[action.unit], false, action.is_last);
        break;
      case ActionKind::drain:
        drain(*units_[action.unit]);
        break;
      case ActionKind::join:
        join();
        break;
      case ActionKind::download:
        kept_->download(action.call);
        break;
      case ActionKind::drain_download:
        kept_->drain_download(action.call);
        break;
      case ActionKind::upload:
        kept_->upload(action.call);
        break;
      case ActionKind::await_upload:
        kept_->await_upload(action.call);
        break;
      case ActionKind::release_kept:
        kept_->release(action.call);
        break;
    }
  } catch (const Error& e) {
    throw e.with_context(context(action));
  } catch (const std::exception& e) {
    throw Error(ErrorCode::comm, e.what(), context(action));
  }
}

void Executor::join() {
  for (const Event* last : {&all_reduced_, &all_outer_reduced_}) {
    streams_->compute_waits(*last);
    if (offloads_) {
      last->synchronize();  // the host reads these gradients
    }
  }
  release_drained();
}

void Executor::end_evaluation() {
  const bool fences = options_.foreign_writes && options_.copy_engines.gather();
  if (!offloads_ && !fences) {
    return;
  }
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      fences ? group->weights().readers().wait()
             : group->weights().readers().wait_for_uploads();
    }
  }
}

void Executor::wait_for_written_weights(const Unit& unit) {
  const std::int64_t generation = unit.weights().generation();
  if (state(unit).waited_for == generation) {
    return;
  }
  const auto stream = streams_->compute();
  for (const auto& group : unit.groups()) {
    if (group->weights().resident() && !group->weights().has_refresh()) {
      group->weights().progress().wait(*stream);
    }
  }
  state(unit).waited_for = generation;
}

std::string Executor::context(const Action& action) const {
  std::string text =
      fmt::format("rank {}/{} | step {}", mesh_->rank(), mesh_->size(), step_);
  if (action.unit != kNoUnit) {
    text += fmt::format(" | unit {}", units_[action.unit]->name());
  }
  return fmt::format("{} | {}", text, to_string(action.kind));
}

SlotView Executor::grads_slot(Unit& unit) {
  UnitState& held = state(unit);
  if (!held.grads.held()) {
    release_drained();
    slots_.acquire(
        unit,
        {.unit = unit.id(), .role = SlotRole::gradients},
        unit.gradients().nbytes(),
        streams_->compute(),
        held.grads);
  }
  return view(held.grads);
}

void Executor::tell_unused(const SlotView& slot) const {
  observers_.slots.tell([&](SlotObserver& o) { o.slot_unused(slot); });
}

void Executor::rest(Unit& unit) {
  const auto stream = streams_->compute();
  unit.gradients().drop();
  unit.pointers().clear();
  UnitState& held = state(unit);
  held.grads_read = {};
  held.reduced = {};
  held.waited_for = -1;
  for (const auto& group : unit.groups()) {
    group->weights().progress().mark_stale();
  }
  // The communication streams are idle.
  const auto give_back = [&](Slot& slot,
                             const std::shared_ptr<Stream>& filler) {
    if (!slot.held()) {
      return;
    }
    observers_.slots.tell(
        [&](SlotObserver& o) { o.slot_released(unit, slot); });
    tell_unused(view(slot));
    Event last_use;
    last_use.record(*stream);
    slots_.release(slot, last_use, filler);
  };
  for (WeightSlot& weights : held.weights) {
    give_back(weights.slot, streams_->gather());
    weights = {};
  }
  give_back(held.grads, stream);
}

}  // namespace flatshard
