#include "flatshard/runtime/unit_calls.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/runtime/model_meshes.h"
#include "flatshard/runtime/runtime_core.h"
#include "flatshard/schedule/simulate.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>

namespace flatshard {

void UnitCalls::forward_begin(UnitId unit, const nn::TensorList& inputs) {
  if (!AutogradEvents::in_backward()) {
    core_.observers.steps.tell(
        [&](StepObserver& o) { o.unit_called(*core_.units[unit]); });
  }
  const std::lock_guard lock(core_.mutex);
  core_.events.forward_begin(unit, inputs);
  core_.step.unsharded[unit] = false;
  core_.show(unit);
}

void UnitCalls::forward_end(
    UnitId unit,
    const nn::TensorList& outputs,
    bool more_follow,
    bool runs_later) {
  const std::lock_guard lock(core_.mutex);
  const auto ended =
      core_.events.forward_end(unit, outputs, more_follow, runs_later);
  if (ended.outermost && ended.needs_backward) {
    core_.observers.steps.tell([&](StepObserver& o) {
      o.expects_backward(*core_.units[unit], ended.call);
    });
  }
  core_.hide(unit);
  if (!core_.events.is_open() && !ended.needs_backward) {
    core_.executor.end_evaluation();
  }
}

void UnitCalls::forward_error(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  const auto done = c10::make_scope_exit([&] { core_.hide(unit); });
  try {
    core_.events.forward_error(unit);
  } catch (const Error& e) {
    const auto meshes = model_meshes(core_.mesh, core_.units);
    if (e.code() != ErrorCode::comm && e.code() != ErrorCode::timeout &&
        std::ranges::none_of(meshes, &Mesh::has_verdict)) {
      throw;
    }
    // A peer is gone. The error that ends this forward reports it already.
    log_debug("while a forward was given up: {}", e.what());
  }
}

void UnitCalls::keeps_inner(UnitId unit, const nn::TensorList& tensors) {
  const std::lock_guard lock(core_.mutex);
  core_.events.watch_inner(unit, tensors);
}

bool UnitCalls::in_forward() const {
  const std::lock_guard lock(core_.mutex);
  return core_.events.in_forward();
}

void UnitCalls::weights_written(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  core_.units[unit]->adopt_foreign_writes();
  core_.feed({.kind = EventKind::unit_written, .unit = unit});
}

void UnitCalls::gathered_written(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  core_.units[unit]->adopt_foreign_writes();
  core_.events.stamp(unit);
}

const void* UnitCalls::await_plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  const std::lock_guard lock(core_.mutex);
  const ParameterRef ref = *core_.events.find(parameter);
  const Unit& unit = *core_.units[ref.unit];
  return core_
      .await_plane(
          ref,
          unit.weights().plane_of(unit.parameters()[ref.index], use))
      .data.const_data_ptr();
}

void UnitCalls::plan_passes(
    const std::vector<ScheduleEvent>& events,
    int max_grad_slots) {
  const std::lock_guard lock(core_.mutex);
  FLATSHARD_CHECK(
      core_.executor.slots().pool().num_held() == 0,
      usage,
      "plan_passes: expected a call between two steps, while no slot is in "
      "use");
  core_.step.scheduler.set_max_grad_slots(max_grad_slots);
  Scheduler scheduler(
      core_.step.scheduler.units(),
      core_.step.scheduler.options());
  replay(scheduler, events);
  scheduler.on({.kind = EventKind::weights_changed});
  core_.executor.slots().plan(
      core_.step.scheduler.units(),
      replay(scheduler, events));
}

}  // namespace flatshard
