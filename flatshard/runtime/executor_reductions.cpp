// The part of the Executor that reduces gradients and then frees their slots.
#include "flatshard/comm/collective_scope.h"
#include "flatshard/device/memory.h"
#include "flatshard/runtime/executor.h"
#include "flatshard/runtime/model_meshes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

/// Returns a flag for each parameter of reduced groups: 1 if this rank had a
/// gradient. Also returns whether only another rank may have had one.
template <class Reduced>
std::pair<at::Tensor, bool> contributed_flags(const Reduced& reduced) {
  std::vector<float> had;
  bool in_doubt = false;
  for (const auto& r : reduced) {
    for (const UnitParameter& p : r.unit->parameters()) {
      if (p.group == r.group) {
        const bool has = r.gradients().contributed(p.index);
        had.push_back(has ? 1 : 0);
        in_doubt |= !has && p.tensor.requires_grad();
      }
    }
  }
  return {at::tensor(had), in_doubt};
}

/// Applies `flags`, the sums over all ranks, on the CPU.
template <class Reduced>
void drop_unused(const Reduced& reduced, const at::Tensor& flags) {
  const float* of_ranks = flags.const_data_ptr<float>();
  for (const auto& r : reduced) {
    for (const UnitParameter& p : r.unit->parameters()) {
      if (p.group == r.group && *of_ranks++ != 0) {
        r.gradients().mark_others_contributed(p.index);
      }
    }
    if (r.is_first && !r.gradients().contributed()) {
      r.gradients().reduced().drop();
    }
  }
}

}  // namespace

void Executor::reduce(Unit& unit, bool collective, bool is_last) {
  UnitState& held = state(unit);
  if (held.reduced.recorded() && observers_.want_reduced_gradients(unit)) {
    held.reduced.wait(*streams_->compute());
  }
  const SlotView slot = grads_slot(unit);
  unit.gradients().finish(slot);
  observers_.gradients.tell(
      [&](GradientObserver& o) { o.gradients_ready(unit, slot); });
  std::vector<Planned> planned;
  for (std::size_t g = 0; g < unit.groups().size(); ++g) {
    ParamGroup& group = *unit.groups()[g];
    if (group.trainable()) {
      planned.push_back(
          {.group = &group,
           .flat = unit.gradients().flat(slot, g),
           .reduction = group.plan_reduction(collective, is_last)});
      const GradientPipeline::Reduction& r = planned.back().reduction;
      if (r.is_complete()) {
        reduced_groups_.push_back({&unit, g, !r.adds.reduced});
      }
      if (r.by_outer()) {
        planned.back().inner = std::make_shared<at::Tensor>();
      }
    }
  }
  Event filled;
  filled.record(*streams_->compute());
  filled.wait(*streams_->reduce());
  for (const Planned& p : planned) {
    queue_collectives(
        *streams_->reduce(),
        p.reduction.inner_groups(),
        [&unit, p, step = step_] {
          const CollectiveScope scope(step, unit.name());
          const at::Tensor inner =
              p.group->gradients().reduce_inner(p.flat, p.reduction);
          if (p.inner != nullptr) {
            *p.inner = inner;
          }
        });
  }
  held.grads_read.record(*streams_->reduce());
  held.reduced = held.grads_read;
  all_reduced_ = held.reduced;
  reduce_outer(unit, planned);
}

void Executor::reduce_outer(Unit& unit, const std::vector<Planned>& planned) {
  if (std::all_of(planned.begin(), planned.end(), [](const Planned& p) {
        return p.inner == nullptr;
      })) {
    return;
  }
  UnitState& held = state(unit);
  held.grads_read.wait(*streams_->outer());
  for (const Planned& p : planned) {
    if (p.inner == nullptr) {
      continue;
    }
    queue_collectives(
        *streams_->outer(),
        p.reduction.outer_groups(),
        [&unit, p, step = step_] {
          const CollectiveScope scope(step, unit.name());
          keep_for_current_stream(*p.inner);
          p.group->gradients().reduce_outer(*p.inner, p.reduction);
          p.inner->reset();
        });
  }
  held.reduced = {};
  held.reduced.record(*streams_->outer());
  all_outer_reduced_ = held.reduced;
  if (std::any_of(planned.begin(), planned.end(), [](const Planned& p) {
        return p.reduction.path == GradientPipeline::Path::outer_of_slot;
      })) {
    held.grads_read = held.reduced;
  }
}

void Executor::tell_reduced(Unit& unit) {
  if (unit.gradients().has_unreduced() ||
      !observers_.want_reduced_gradients(unit)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto tell = [&] {
    observers_.gradients.tell(
        [&](GradientObserver& o) { o.gradients_reduced(unit); });
  };
  Event& reduced = state(unit).reduced;
  if (!mesh_->device().is_cuda() || offloads_) {
    reduced.synchronize();
    tell();
    return;
  }
  // After the unit's reduction, wherever that ended.
  reduced.wait(*streams_->reduce());
  streams_->reduce()->submit(tell);
  reduced.record(*streams_->reduce());
  all_reduced_ = reduced;
}

void Executor::drop_unused_grads() {
  const auto of_backward = std::exchange(reduced_groups_, {});
  if (!options_.unused_grads_stay_undefined || of_backward.empty()) {
    return;
  }
  for (const auto& mesh : model_meshes(mesh_, units_)) {
    std::vector<ReducedGroup> reduced;
    for (const ReducedGroup& r : of_backward) {
      if (r.unit->groups()[r.group]->model_mesh()->same_as(*mesh)) {
        reduced.push_back(r);
      }
    }
    if (reduced.empty()) {
      continue;
    }
    auto [flags, in_doubt] = contributed_flags(reduced);
    if (mesh->size() > 1) {
      const auto of_all = std::make_shared<at::Tensor>();
      Communicator* const world = &mesh->world(Purpose::reduce);
      queue_collectives(
          *streams_->reduce(),
          {&world, 1},
          [flags = flags,
           of_all,
           device = mesh->device(),
           world,
           step = step_] {
            const CollectiveScope scope(step, "which gradients there are");
            *of_all = flags.to(device, /*non_blocking=*/true);
            world->all_reduce(*of_all, ReduceOp::sum);
          });
      Event done;
      done.record(*streams_->reduce());
      done.wait(*streams_->compute());
      if (!in_doubt) {
        continue;
      }
      flags = of_all->cpu();
    }
    drop_unused(reduced, flags);
  }
}

void Executor::drain(Unit& unit) {
  UnitState& held = state(unit);
  if (!held.grads.held()) {
    return;  // nobody wrote it
  }
  Event last_use = held.grads_read;
  if (observers_.want_unused_slots()) {
    last_use = tell_unused_after_reduction(unit);
  }
  drained_.push_back(
      {&unit, std::exchange(held.grads, {}), std::move(last_use)});
  if (!options_.slots_on_demand) {
    release_drained();
  }
}

Event Executor::tell_unused_after_reduction(const Unit& unit) {
  const UnitState& held = state(unit);
  // After an exception the slot may still be written by compute, and no
  // reduction follows.
  Event written;
  written.record(*streams_->compute());
  written.wait(*streams_->reduce());
  held.grads_read.wait(*streams_->reduce());
  streams_->reduce()->submit(
      [this, slot = view(held.grads)] { tell_unused(slot); });
  Event last_use;
  last_use.record(*streams_->reduce());
  return last_use;
}

void Executor::release_drained() {
  for (Drained& drained : std::exchange(drained_, {})) {
    observers_.slots.tell(
        [&](SlotObserver& o) { o.slot_released(*drained.unit, drained.slot); });
    slots_.release(
        drained.slot,
        std::move(drained.last_use),
        streams_->compute());
  }
}

}  // namespace flatshard
