#include "flatshard/overlap/backward_pass.h"

#include "flatshard/core/error.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/runtime/runtime.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

namespace flatshard {

BackwardPass::BackwardPass(std::shared_ptr<Runtime> runtime, bool tells_graphs)
    : runtime_(std::move(runtime)), core_(runtime_->core()) {
  FLATSHARD_CHECK(
      !core_.options.debug.strict,
      usage,
      "a backward pass cannot be combined with debug.strict, because strict "
      "checks the calls of modules and a pass makes none; set debug.strict = "
      "false");
  FLATSHARD_CHECK(
      !runtime_->graphs().enabled() ||
          (tells_graphs && runtime_->graphs().regions()),
      usage,
      "a backward pass: expected graphs to be off (GraphOptions::enabled); "
      "only an OverlapRunner passes them the microbatch that runs, and a full "
      "step that interleaves microbatches is not a graph");
}

BackwardPass::~BackwardPass() {
  if (closed_ || (calls_.empty() && !open_)) {
    return;
  }
  const std::lock_guard lock(core_.mutex);
  if (core_.open_backward == &backward_) {
    core_.open_backward = nullptr;
  }
  core_.events.passes().give_up();
  if (!core_.step.failed()) {
    core_.step.failure = "a pass that was given up";
  }
}

// -- forward -----------------------------------------------------------------

void BackwardPass::forward_begin(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  FLATSHARD_CHECK(
      !calls_.contains(unit) && !open_ && !closed_,
      usage,
      "a backward pass: expected unit {} to run once, before the backward",
      core_.units[unit]->name());
  calls_[unit] = core_.events.passes().begin_call(unit);
  core_.step.unsharded[unit] = false;
  core_.show(unit);
}

void BackwardPass::forward_end(UnitId unit, bool more_follow) {
  const std::lock_guard lock(core_.mutex);
  core_.events.passes().end_call(call_of(unit), more_follow);
  core_.hide(unit);
}

UnitCall& BackwardPass::call_of(UnitId unit) {
  const auto found = calls_.find(unit);
  FLATSHARD_CHECK(
      found != calls_.end(),
      usage,
      "a backward pass: unit {} had no forward in it",
      core_.units[unit]->name());
  return *found->second;
}

// -- backward ----------------------------------------------------------------

void BackwardPass::open_backward(const Options& options) {
  runtime_->set_is_last_microbatch(options.is_last);
  const std::lock_guard lock(core_.mutex);
  FLATSHARD_CHECK(
      core_.open_backward == nullptr && !closed_,
      usage,
      "a backward pass: expected one open backward at a time, and one of each "
      "pass; close the other one first");
  FLATSHARD_CHECK(
      !core_.step.failed(),
      usage,
      "a backward pass cannot continue after this failure: {}",
      core_.step.failure);
  std::vector<UnitId> units;
  for (const auto& [unit, call] : calls_) {
    FLATSHARD_CHECK(
        call->end >= 0,
        usage,
        "a backward pass: expected the forward of unit {} to be over",
        core_.units[unit]->name());
    units.push_back(unit);
  }
  const at::NoGradGuard no_grad;
  token_ = std::make_shared<int>();
  open_ = true;
  backward_.interleaved = options.interleaved;
  core_.open_backward = &backward_;
  task_ = core_.events.passes().open(units, options.interleaved, token_);
}

void BackwardPass::backward_begin(UnitId unit) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(core_.mutex);
  core_.events.passes().begin_backward(call_of(unit));
  core_.show(unit);
}

void BackwardPass::recompute_begin(UnitId unit) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(core_.mutex);
  core_.events.passes().event(EventKind::recompute_begin, call_of(unit));
  backward_.recomputing.insert(unit);
  core_.show(unit);
}

void BackwardPass::recompute_end(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  core_.events.passes().event(EventKind::recompute_end, call_of(unit));
  backward_.recomputing.erase(unit);
}

void BackwardPass::backward_end(UnitId unit) {
  const std::lock_guard lock(core_.mutex);
  core_.events.passes().event(EventKind::inputs_done, call_of(unit));
}

void BackwardPass::run_wgrads(UnitId unit, int node) {
  std::vector<OpenBackward::Late> now;
  std::vector<OpenBackward::Late> later;
  for (OpenBackward::Late& late : std::exchange(backward_.late, {})) {
    const bool is_due = late.parameter.unit == unit && late.node == node;
    (is_due ? now : later).push_back(std::move(late));
  }
  backward_.late = std::move(later);
  for (const OpenBackward::Late& late : now) {
    run_late(late);
  }
}

void BackwardPass::run_late(const OpenBackward::Late& late) {
  const at::NoGradGuard no_grad;
  Unit& unit = *core_.units[late.parameter.unit];
  nn::WgradTarget target;
  {
    const std::lock_guard lock(core_.mutex);
    std::optional<nn::WgradTarget> sum;
    if (late.wgrad.adds_to_float32) {
      sum = core_.sum_target(late.parameter);
    }
    target = sum ? *sum
                 : unit.gradients().target(
                       core_.executor.grads_slot(unit),
                       late.parameter.index);
  }
  late.wgrad.write(target.grad, target.accumulate);
  const std::lock_guard lock(core_.mutex);
  unit.gradients().mark_written(late.parameter.index);
  core_.events.passes().late_wgrad_done(late.parameter);
}

void BackwardPass::close_backward() {
  FLATSHARD_CHECK(
      open_,
      usage,
      "a backward pass: expected close_backward after open_backward");
  for (const OpenBackward::Late& late : std::exchange(backward_.late, {})) {
    run_late(late);
  }
  core_.on_task_end(task_);
  const std::lock_guard lock(core_.mutex);
  core_.open_backward = nullptr;
  open_ = false;
  closed_ = true;
  token_.reset();
}

}  // namespace flatshard
