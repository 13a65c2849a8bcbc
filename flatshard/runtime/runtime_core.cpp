#include "flatshard/runtime/runtime_core.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/outside_of_transforms.h"
#include "flatshard/schedule/simulate.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// A step that is longer than this (an evaluation over an entire dataset between
// two updates) repeats itself. Its start is enough to plan slots.
constexpr std::size_t kMaxStepActions = 1 << 16;

std::vector<UnitSpec> specs_of(
    const std::vector<std::unique_ptr<Unit>>& units,
    const std::vector<UnitId>& parents,
    const RuntimeOptions& options) {
  FLATSHARD_CHECK(
      units.size() == parents.size(),
      internal,
      "expected one parent per unit");
  std::vector<UnitSpec> specs;
  for (std::size_t u = 0; u < units.size(); ++u) {
    specs.push_back(units[u]->spec(parents[u], options.unit_policy()));
  }
  return specs;
}

}  // namespace

RuntimeCore::RuntimeCore(
    std::shared_ptr<Mesh> mesh_of_units,
    Units all_units,
    const std::vector<UnitId>& parents,
    const RuntimeOptions& chosen)
    : mesh(std::move(mesh_of_units)),
      options(chosen),
      units(std::move(all_units)),
      step{
          .scheduler =
              Scheduler(specs_of(units, parents, options), options.scheduler()),
          .unsharded = std::vector<bool>(units.size(), false)},
      executor(mesh, units, observers, options),
      events(units, *this),
      abandoned(std::make_shared<AbandonedParts>()) {
  plan_next_step();
}

std::vector<ParamGroup*> RuntimeCore::all_groups() const {
  std::vector<ParamGroup*> groups;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups()) {
      groups.push_back(group.get());
    }
  }
  return groups;
}

std::vector<ParamGroup*> RuntimeCore::trainable_groups() const {
  std::vector<ParamGroup*> groups = all_groups();
  std::erase_if(groups, [](const ParamGroup* g) { return !g->trainable(); });
  return groups;
}

// -- forward -----------------------------------------------------------------

void RuntimeCore::adopt_foreign_writes() {
  const OutsideOfTransforms outside;
  for (const auto& unit : units) {
    unit->adopt_foreign_writes();
  }
}

void RuntimeCore::before_root_forward() {
  if (failed()) {
    reset_after_failure();
  }
  release_abandoned();
  observers.steps.tell([](StepObserver& o) { o.forward_begins(); });
  events.forget_dead_tensors();
  adopt_foreign_writes();
  std::int64_t generation = 0;
  for (const auto& unit : units) {
    generation += unit->weights().generation();
  }
  const bool weights_changed = generation != step.generation;
  if (weights_changed) {
    begin_step(generation);
  }
  const bool at_rest = executor.slots().pool().num_held() == 0 &&
                       !events.is_open() && !AutogradEvents::in_backward();
  observers.steps.tell([&](StepObserver& o) {
    o.root_forward_begins(weights_changed, at_rest);
  });
}

void RuntimeCore::begin_step(std::int64_t generation) {
  step.generation = generation;
  if (step.graph_reads_weights) {
    step.graph_reads_weights = false;
    hide_all();
  }
  feed({.kind = EventKind::weights_changed});
  if (executor.slots().should_replan()) {
    // The next step is assumed to repeat the last one.
    executor.slots().plan(step.scheduler.units(), step.actions);
  }
  step.actions.clear();
}

void RuntimeCore::forward_begins(UnitId unit, bool outermost) {
  FLATSHARD_CHECK(
      !step.failed() || outermost,
      usage,
      "unit {} was called although this forward or backward failed: {}; let "
      "the exception leave the model, or call reset()",
      units[unit]->name(),
      step.failure);
  if (outermost) {
    before_root_forward();
  }
  executor.wait_for_written_weights(*units[unit]);
  if (units[unit]->resident()) {
    units[unit]->pointers().check_storage();  // nothing else looks at it
  }
  observers.steps.tell(
      [&](StepObserver& o) { o.unit_forward_begins(*units[unit]); });
}

void RuntimeCore::set_microbatch(bool is_last, bool sync) {
  step.is_last_microbatch = is_last;
  step.sync_gradients = sync;
  feed({.kind = EventKind::microbatch, .is_last = is_last, .sync = sync});
}

// -- backward ----------------------------------------------------------------

void RuntimeCore::task_begins() {
  if (failed()) {
    reset_after_failure();
  }
  if (events.in_task()) {
    return;
  }
  observers.steps.tell([](StepObserver& o) { o.backward_begins(); });
  for (const auto& unit : units) {
    show(unit->id());  // kept since the forward, or always there
  }
  // A write since the forward raises the generation. Then it differs from the
  // call's generation.
  adopt_foreign_writes();
}

void RuntimeCore::backward_begins(UnitId unit, CallId call) {
  step.graph_reads_weights |= at::GradMode::is_enabled();
  step.unsharded[unit] = false;
  observers.steps.tell(
      [&](StepObserver& o) { o.backward_began(*units[unit], call); });
}

void RuntimeCore::on_tensor_grad(const WatchedTensor& tensor) {
  const std::lock_guard lock(mutex);
  events.tensor_grad(tensor);
}

void RuntimeCore::on_parameter_done(ParameterRef ref) {
  const std::lock_guard lock(mutex);
  if (!observers.gradients.empty()) {
    const Unit& unit = *units[ref.unit];
    const UnitParameter& p = unit.parameters()[ref.index];
    events.enter_task(&p);
    observers.gradients.tell(
        [&](GradientObserver& o) { o.gradient_arrived(unit, p); });
  }
  events.parameter_done(ref);
}

void RuntimeCore::on_task_end(TaskId task) {
  const std::lock_guard lock(mutex);
  if (!events.task_end(task)) {
    return;
  }
  hide_all();
  if (!step.failed()) {
    const OutsideOfTransforms outside;
    try {
      executor.drop_unused_grads();
    } catch (const std::exception& e) {
      step.failure = e.what();
      throw;
    }
  }
  observers.steps.tell([](StepObserver& o) { o.backward_ended(); });
  // Weights that the forward of another pass keeps for its backward stay.
  const bool goes_on = open_backward != nullptr && open_backward->interleaved;
  if (!step.failed() && !events.in_forward() && !goes_on) {
    FLATSHARD_CHECK(
        step.scheduler.resting(),
        internal,
        "after the backward these units are still in use: {}",
        fmt::join(step.scheduler.busy_units(), ", "));
  }
}

// -- actions -----------------------------------------------------------------

void RuntimeCore::plan_next_step() {
  executor.slots().plan(
      step.scheduler.units(),
      simulate_step(step.scheduler.units(), step.scheduler.options()));
}

void RuntimeCore::feed(const ScheduleEvent& event) {
  if (step.failed()) {
    return;  // units and scheduler disagree until the reset
  }
  const OutsideOfTransforms outside;
  try {
    for (const Action& action : decide(event)) {
      record(action);
      executor.execute(action);
      if (action.kind == ActionKind::reduce) {
        executor.tell_reduced(*units[action.unit]);
      }
    }
  } catch (const std::exception& e) {
    step.failure = e.what();
    throw;
  }
}

std::vector<Action> RuntimeCore::decide(const ScheduleEvent& event) {
  if (options.trace) {
    trace.events.push_back(event);
  }
  return step.scheduler.on(event);
}

PlaneView RuntimeCore::await_plane(ParameterRef ref, PlaneId plane) {
  Unit& unit = *units[ref.unit];
  const UnitParameter& p = unit.parameters()[ref.index];
  const bool in_backward = AutogradEvents::in_backward() ||
                           (open_backward != nullptr &&
                            open_backward->recomputing.contains(ref.unit));
  FLATSHARD_CHECK(
      in_backward || events.is_open(ref.unit) || step.unsharded[ref.unit],
      usage,
      "parameter {} of unit {} is resharded: call the unit itself, through its "
      "holder (`block(x)`, not `block->forward(x)` or one of its submodules)",
      p.name,
      unit.name());
  if (in_backward) {
    events.enter_task();
  }
  feed(
      {.kind = EventKind::read,
       .unit = ref.unit,
       .plane = plane,
       .part = unit.weights().part_of(p)});
  FLATSHARD_CHECK(
      !step.failed(),
      usage,
      "parameter {} of unit {} was read although this forward or backward "
      "failed: {}",
      p.name,
      unit.name(),
      step.failure);
  return executor.awaited(unit, p, plane);
}

void RuntimeCore::kept_done(UnitId unit, CallId call) {
  KeptActivations& kept = *executor.kept();
  if (kept.remove_reader(call)) {
    feed({.kind = EventKind::kept_done, .unit = unit, .call = call});
    kept.release(call);  // if it was never moved
  }
}

void RuntimeCore::release_abandoned() {
  for (const auto& [unit, call] : abandoned->take()) {
    kept_done(unit, call);
  }
}

std::optional<nn::WgradTarget> RuntimeCore::sum_target(ParameterRef parameter) {
  if (observers.need_gradient_slots()) {
    return std::nullopt;
  }
  const Scheduler& scheduler = step.scheduler;
  const Action next = scheduler.next_reduction(parameter.unit);
  // The gradients of a tied head come first, and a root is reduced last: a sum
  // would need memory in all of the backward.
  const bool may_allocate =
      !next.is_last || !scheduler.has_children(parameter.unit);
  return units[parameter.unit]->gradients().sum_target(
      parameter.index,
      /*collective=*/next.kind == ActionKind::reduce,
      next.is_last,
      may_allocate);
}

void RuntimeCore::record(const Action& action) {
  if (step.actions.size() < kMaxStepActions) {
    step.actions.push_back(action);
  }
  if (options.trace) {
    trace.actions.push_back(action);
  }
}

// -- access to parameters -----------------------------------------------------

void RuntimeCore::show(UnitId unit) {
  if (executor.has_weights(*units[unit])) {
    units[unit]->pointers().show();
  }
}

void RuntimeCore::hide(UnitId unit) {
  if (!events.is_open(unit) && !step.unsharded[unit] && !events.in_task() &&
      !step.graph_reads_weights) {
    units[unit]->pointers().hide();
  }
}

void RuntimeCore::hide_all() {
  for (const auto& unit : units) {
    hide(unit->id());
  }
}

// -- after a failure ---------------------------------------------------------

void RuntimeCore::reset() {
  events.reset();
  step.failure.clear();
  for (const Action& action : decide({.kind = EventKind::reset})) {
    record(action);
  }
  step.unsharded.assign(units.size(), false);
  executor.reset();
  step.graph_reads_weights = false;
  hide_all();
  for (ParamGroup* group : trainable_groups()) {
    group->gradients().zero();
  }
  observers.steps.tell([](StepObserver& o) { o.was_reset(); });
  step.generation = -1;  // refreshes that failed are done again
  set_microbatch(step.is_last_microbatch, step.sync_gradients);
}

void RuntimeCore::reset_after_failure() {
  const auto all = trainable_groups();
  if (std::any_of(all.begin(), all.end(), [](const ParamGroup* group) {
        return group->gradients().reduced().exists() ||
               group->gradients().has_unreduced();
      })) {
    log_warning(
        "step {}: the gradients of this step are dropped, because {} failed",
        executor.step(),
        !step.failed() ? "a backward" : step.failure);
  }
  reset();
}

}  // namespace flatshard
