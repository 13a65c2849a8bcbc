#include "flatshard/unit/backward_pass.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/unit/runtime.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {

BackwardPass::BackwardPass(std::shared_ptr<Runtime> runtime, bool tells_graphs)
    : runtime_(std::move(runtime)) {
  FLATSHARD_CHECK(
      !runtime_->strict_,
      usage,
      "a backward pass: expected debug.strict = false, which watches the calls "
      "of modules; a pass has none");
  FLATSHARD_CHECK(
      !runtime_->graphs_.enabled() ||
          (tells_graphs && runtime_->graphs_.regions()),
      usage,
      "a backward pass: expected graphs to be off (GraphOptions::enabled); "
      "an OverlapRunner alone tells them which microbatch runs, and a whole "
      "step that interleaves microbatches is no graph");
}

BackwardPass::~BackwardPass() {
  if (closed_ || (calls_.empty() && !open_)) {
    return;
  }
  const std::lock_guard lock(runtime_->mutex_);
  if (runtime_->open_pass_ == this) {
    runtime_->open_pass_ = nullptr;
  }
  runtime_->events_.passes().give_up();
  if (runtime_->failure_.empty()) {
    runtime_->failure_ = "a pass that was given up";
  }
}

// -- forward -----------------------------------------------------------------

void BackwardPass::forward_begin(UnitId unit) {
  const std::lock_guard lock(runtime_->mutex_);
  FLATSHARD_CHECK(
      !calls_.contains(unit) && !open_ && !closed_,
      usage,
      "a backward pass: expected unit {} to run once, before the backward",
      runtime_->units_[unit]->name());
  calls_[unit] = runtime_->events_.passes().begin_call(unit);
  runtime_->by_hand_[unit] = false;
  runtime_->reveal(*runtime_->units_[unit]);
}

void BackwardPass::forward_end(UnitId unit) {
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->events_.passes().end_call(call_of(unit));
  runtime_->hide(*runtime_->units_[unit]);
}

UnitCall& BackwardPass::call_of(UnitId unit) {
  const auto found = calls_.find(unit);
  FLATSHARD_CHECK(
      found != calls_.end(),
      usage,
      "a backward pass: expected a forward of unit {} in it, got none",
      runtime_->units_[unit]->name());
  return *found->second;
}

// -- backward ----------------------------------------------------------------

void BackwardPass::open_backward(const Options& options) {
  runtime_->set_is_last_microbatch(options.is_last);
  const std::lock_guard lock(runtime_->mutex_);
  FLATSHARD_CHECK(
      runtime_->open_pass_ == nullptr && !closed_,
      usage,
      "a backward pass: expected one open backward at a time, and one of each "
      "pass; close the other one first");
  FLATSHARD_CHECK(
      runtime_->failure_.empty(),
      usage,
      "a backward pass cannot go on after this failure: {}",
      runtime_->failure_);
  std::vector<UnitId> units;
  for (const auto& [unit, call] : calls_) {
    FLATSHARD_CHECK(
        call->end >= 0,
        usage,
        "a backward pass: expected the forward of unit {} to be over",
        runtime_->units_[unit]->name());
    units.push_back(unit);
  }
  const at::NoGradGuard no_grad;
  token_ = std::make_shared<int>();
  open_ = true;
  interleaved_ = options.interleaved;
  runtime_->open_pass_ = this;
  task_ = runtime_->events_.passes().open(units, options.interleaved, token_);
}

void BackwardPass::backward_begin(UnitId unit) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->events_.passes().begin_backward(call_of(unit));
  runtime_->reveal(*runtime_->units_[unit]);
}

void BackwardPass::recompute_begin(UnitId unit) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->events_.passes().event(EventKind::recompute_begin, call_of(unit));
  recomputing_.insert(unit);
  runtime_->reveal(*runtime_->units_[unit]);
}

void BackwardPass::recompute_end(UnitId unit) {
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->events_.passes().event(EventKind::recompute_end, call_of(unit));
  recomputing_.erase(unit);
}

void BackwardPass::backward_end(UnitId unit) {
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->events_.passes().event(EventKind::inputs_done, call_of(unit));
}

void BackwardPass::run_wgrads(UnitId unit, int node) {
  std::vector<Late> now;
  std::vector<Late> later;
  for (Late& late : std::exchange(late_, {})) {
    const bool is_due = late.parameter.unit == unit && late.node == node;
    (is_due ? now : later).push_back(std::move(late));
  }
  late_ = std::move(later);
  for (const Late& late : now) {
    run_late(late);
  }
}

void BackwardPass::run_late(const Late& late) {
  const at::NoGradGuard no_grad;
  Unit& unit = *runtime_->units_[late.parameter.unit];
  UnitParameter& p = unit.parameters()[late.parameter.index];
  at::Tensor grad;
  {
    const std::lock_guard lock(runtime_->mutex_);
    grad = unit.gradients().view(runtime_->executor_.grads_slot(unit), p);
  }
  late.write(grad, /*accumulate=*/p.in_slot);
  const std::lock_guard lock(runtime_->mutex_);
  p.in_slot = true;
  runtime_->events_.passes().late_wgrad_done(late.parameter);
}

void BackwardPass::close_backward() {
  FLATSHARD_CHECK(
      open_,
      usage,
      "a backward pass: expected close_backward after open_backward");
  for (const Late& late : std::exchange(late_, {})) {
    run_late(late);
  }
  runtime_->on_task_end(task_);
  const std::lock_guard lock(runtime_->mutex_);
  runtime_->open_pass_ = nullptr;
  open_ = false;
  closed_ = true;
  token_.reset();
}

// -- the Runtime's side ------------------------------------------------------

bool Runtime::defers(const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  return open_pass_ != nullptr && open_pass_->delays_ &&
         events_.wgrad_begins(parameter) != nullptr;
}

void Runtime::defer(const at::Tensor& parameter, nn::LateWgrad write) {
  const std::lock_guard lock(mutex_);
  const ParameterRef ref = *events_.find(parameter);
  events_.passes().put_off(ref);
  open_pass_->late_.push_back({ref, open_pass_->node_, std::move(write)});
}

}  // namespace flatshard
