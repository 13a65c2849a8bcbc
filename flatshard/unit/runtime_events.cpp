// Between AutogradEvents, Scheduler and Executor: what the Runtime does when a
// program's forwards and backwards begin and end.
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/outside_of_transforms.h"
#include "flatshard/unit/backward_pass.h"
#include "flatshard/unit/runtime.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace flatshard {

// -- forward -----------------------------------------------------------------

void Runtime::adopt_foreign_writes() {
  const OutsideOfTransforms outside;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      group->weights().adopt_foreign_writes();
    }
  }
}

void Runtime::before_root_forward() {
  if (failed()) {
    reset_after_failure();
  }
  observers_.tell([](RuntimeObserver& o) { o.forward_begins(); });
  events_.forget_dead_tensors();
  adopt_foreign_writes();
  std::int64_t generation = 0;
  for (const auto& unit : units_) {
    generation += unit->weights().generation();
  }
  const bool weights_changed = generation != seen_generation_;
  if (weights_changed) {
    begin_step(generation);
  }
  if (graphs_.regions()) {
    graphs_.regions()->root_forward_begins(
        weights_changed,
        executor_.slots().pool().num_held() == 0 && !events_.is_open() &&
            !AutogradEvents::in_backward());
  }
}

void Runtime::begin_step(std::int64_t generation) {
  if (strict_) {
    strict_->end_step();
    strict_->weights_changed();
  }
  seen_generation_ = generation;
  if (graph_reads_weights_) {
    graph_reads_weights_ = false;
    hide_all();
  }
  executor_.wait_for_written_weights();
  feed({.kind = EventKind::weights_changed});
  if (executor_.slots().should_replan()) {
    executor_.slots().plan(scheduler_.units(), step_actions_);  // what it did
  }
  step_actions_.clear();
}

void Runtime::forward_begins(UnitId unit, bool outermost) {
  FLATSHARD_CHECK(
      failure_.empty() || outermost,
      usage,
      "unit {} was called although this forward or backward failed: {}; let "
      "the exception leave the model, or call reset()",
      units_[unit]->name(),
      failure_);
  if (outermost) {
    before_root_forward();
  }
  if (units_[unit]->resident()) {
    units_[unit]->pointers().check_storage();  // nothing else looks at it
  }
  if (strict_) {
    strict_->forward_begin(unit);
  }
}

// -- backward ----------------------------------------------------------------

bool Runtime::failed() const {
  return !failure_.empty() || events_.has_dead_task();
}

void Runtime::task_begins() {
  if (failed()) {
    reset_after_failure();
  }
  if (events_.in_task()) {
    return;
  }
  observers_.tell([](RuntimeObserver& o) { o.backward_begins(); });
  for (const auto& unit : units_) {
    reveal(*unit);  // kept since the forward, or always there
  }
  // A write since the forward raises the generation, which then differs from
  // the call's.
  adopt_foreign_writes();
}

void Runtime::backward_begins(UnitId unit, CallId call) {
  graph_reads_weights_ |= at::GradMode::is_enabled();
  by_hand_[unit] = false;
  if (strict_) {
    strict_->backward_begin(call);
  }
  observers_.tell([&](RuntimeObserver& o) { o.backward_began(*units_[unit]); });
}

void Runtime::on_tensor_grad(const WatchedTensor& tensor) {
  const std::lock_guard lock(mutex_);
  events_.tensor_grad(tensor);
}

void Runtime::on_parameter_done(ParameterRef ref) {
  const std::lock_guard lock(mutex_);
  if (strict_) {
    const UnitParameter& p = units_[ref.unit]->parameters()[ref.index];
    events_.enter_task(&p);
    strict_->parameter_done(ref.unit, p.name);
  }
  events_.parameter_done(ref);
}

void Runtime::on_task_end(TaskId task) {
  const std::lock_guard lock(mutex_);
  if (!events_.task_end(task)) {
    return;
  }
  hide_all();
  if (failure_.empty()) {
    const OutsideOfTransforms outside;
    try {
      executor_.drop_unused_grads();
    } catch (const std::exception& e) {
      failure_ = e.what();
      throw;
    }
  }
  observers_.tell([](RuntimeObserver& o) { o.backward_ended(); });
  // What the forward of another pass left for its backward stays.
  const bool goes_on = open_pass_ != nullptr && open_pass_->interleaved_;
  if (failure_.empty() && !events_.in_forward() && !goes_on) {
    FLATSHARD_CHECK(
        scheduler_.resting(),
        internal,
        "after the backward these units do not rest: {}",
        fmt::join(scheduler_.restless_units(), ", "));
  }
}

std::optional<nn::WgradTarget> Runtime::begin_wgrad(
    const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const ParameterRef* const ref = events_.wgrad_begins(parameter);
  if (ref == nullptr) {
    return std::nullopt;
  }
  Unit& unit = *units_[ref->unit];
  const UnitParameter& p = unit.parameters()[ref->index];
  return nn::WgradTarget{
      unit.gradients().view(executor_.grads_slot(unit), p),
      /*accumulate=*/p.in_slot};
}

void Runtime::end_wgrad(const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const ParameterRef ref = *events_.find(parameter);
  units_[ref.unit]->parameters()[ref.index].in_slot = true;
}

void Runtime::recompute_begin(nn::Module&) {
  const std::lock_guard lock(mutex_);
  if (AutogradEvents::in_backward()) {
    events_.enter_task();
  }
}

void Runtime::recompute_end(nn::Module&) {
}

}  // namespace flatshard
