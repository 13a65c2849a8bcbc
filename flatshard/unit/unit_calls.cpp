#include "flatshard/unit/unit_calls.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/unit/backward_pass.h"
#include "flatshard/unit/runtime.h"

#include <c10/util/ScopeExit.h>

namespace flatshard {

void UnitCalls::forward_begin(UnitId unit, const nn::TensorList& inputs) {
  if (runtime_.strict_ && !AutogradEvents::in_backward()) {
    runtime_.say_next(unit);
  }
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.events_.forward_begin(unit, inputs);
  runtime_.by_hand_[unit] = false;
  runtime_.reveal(*runtime_.units_[unit]);
}

void UnitCalls::forward_end(
    UnitId unit,
    const nn::TensorList& outputs,
    bool more_follow) {
  const std::lock_guard lock(runtime_.mutex_);
  const auto ended = runtime_.events_.forward_end(unit, outputs, more_follow);
  if (runtime_.strict_ && ended.outermost && ended.needs_backward) {
    runtime_.strict_->expect_backward(unit, ended.call);
  }
  runtime_.hide(*runtime_.units_[unit]);
  if (!runtime_.events_.is_open() && !ended.needs_backward) {
    runtime_.executor_.end_evaluation();
  }
}

void UnitCalls::forward_error(UnitId unit) {
  const std::lock_guard lock(runtime_.mutex_);
  const auto done =
      c10::make_scope_exit([&] { runtime_.hide(*runtime_.units_[unit]); });
  try {
    runtime_.events_.forward_error(unit);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::comm && e.code() != ErrorCode::timeout &&
        !runtime_.mesh_->has_verdict()) {
      throw;
    }
    // A peer is gone: the error that ends this forward says so already.
    log_debug("while a forward was given up: {}", e.what());
  }
}

void UnitCalls::keeps_inner(UnitId unit, const nn::TensorList& tensors) {
  const std::lock_guard lock(runtime_.mutex_);
  runtime_.events_.watch_inner(unit, tensors);
}

bool UnitCalls::in_forward() const {
  const std::lock_guard lock(runtime_.mutex_);
  return runtime_.events_.in_forward();
}

void UnitCalls::weights_written(UnitId unit) {
  const std::lock_guard lock(runtime_.mutex_);
  for (const auto& group : runtime_.units_[unit]->groups()) {
    group->weights().adopt_foreign_writes();
  }
  runtime_.feed({.kind = EventKind::unit_written, .unit = unit});
}

void UnitCalls::gathered_written(UnitId unit) {
  const std::lock_guard lock(runtime_.mutex_);
  for (const auto& group : runtime_.units_[unit]->groups()) {
    group->weights().adopt_foreign_writes();
  }
  runtime_.events_.stamp(unit);
}

std::unique_ptr<BackwardPass> UnitCalls::backward_pass() {
  return std::make_unique<BackwardPass>(runtime_.shared_from_this());
}

void UnitCalls::plan_passes(
    const std::vector<ScheduleEvent>& events,
    int max_grad_slots) {
  const std::lock_guard lock(runtime_.mutex_);
  FLATSHARD_CHECK(
      runtime_.executor_.slots().pool().num_held() == 0,
      usage,
      "plan_passes: expected it between two steps, while no slot is held");
  runtime_.scheduler_.set_max_grad_slots(max_grad_slots);
  Scheduler scheduler(
      runtime_.scheduler_.units(),
      runtime_.scheduler_.options());
  replay(scheduler, events);
  scheduler.on({.kind = EventKind::weights_changed});
  runtime_.executor_.slots().plan(
      runtime_.scheduler_.units(),
      replay(scheduler, events));
}

}  // namespace flatshard
