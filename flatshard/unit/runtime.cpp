#include "flatshard/unit/runtime.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/outside_of_transforms.h"
#include "flatshard/nn/module.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/simulate.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// A step that is longer than this (an evaluation over a whole corpus between
// two updates) repeats itself; its beginning is enough to plan slots.
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
    specs.push_back(units[u]->spec(
        parents[u],
        {.reshard_after_forward = options.reshard_after_forward}));
  }
  return specs;
}

}  // namespace

Runtime::Runtime(
    std::shared_ptr<Mesh> mesh,
    std::vector<std::unique_ptr<Unit>> units,
    std::vector<UnitId> parents,
    RuntimeOptions options)
    : mesh_(std::move(mesh)),
      options_(options),
      units_(std::move(units)),
      scheduler_(
          specs_of(units_, parents, options),
          SchedulerOptions{.prefetch = options.prefetch}),
      executor_(mesh_, units_, observers_, options),
      events_(units_, *this),
      by_hand_(units_.size(), false) {
  plan_next_step();
}

std::shared_ptr<Runtime> Runtime::create(
    std::shared_ptr<Mesh> mesh,
    std::vector<std::unique_ptr<Unit>> units,
    std::vector<UnitId> parents,
    RuntimeOptions options) {
  mesh = use_copy_engines(
      std::move(mesh),
      units,
      options.copy_engines,
      options.streams);
  std::shared_ptr<Runtime> runtime(new Runtime(
      std::move(mesh),
      std::move(units),
      std::move(parents),
      options));
  runtime->events_.install_hooks(runtime);
  runtime->hook_modules();
  runtime->hide_all();
  if (options.graphs.enabled) {
    check_graph_options(options, runtime->mesh_->device(), runtime->units_);
    runtime->graphs_.enable(options.graphs, runtime);
  }
  if (options.debug.strict) {
    FLATSHARD_CHECK(
        runtime->units_.front()->module() != nullptr,
        config,
        "debug.strict watches modules of nn::Module; these units have none");
    runtime->watch_modules();
  }
  return runtime;
}

Runtime::~Runtime() {
  module_hooks_.clear();
  try {
    executor_.streams().synchronize();
  } catch (const std::exception& e) {
    log_debug("while a runtime was destroyed: {}", e.what());
  }
  for (auto& unit : units_) {
    for (UnitParameter& p : unit->parameters()) {
      // The memory goes with this object. Python's units say so themselves.
      unit->module() != nullptr ? p.storage.retire() : p.storage.clear();
    }
  }
}

// As if its units ran once each, in their order.
void Runtime::plan_next_step() {
  executor_.slots().plan(
      scheduler_.units(),
      simulate_step(scheduler_.units(), scheduler_.options()));
}

// -- the training loop's side ------------------------------------------------

void Runtime::set_is_last_microbatch(bool is_last) {
  const std::lock_guard lock(mutex_);
  is_last_microbatch_ = is_last;
  feed(
      {.kind = EventKind::microbatch,
       .is_last = is_last,
       .sync = sync_gradients_});
}

void Runtime::set_max_grad_slots(int max_grad_slots) {
  const std::lock_guard lock(mutex_);
  FLATSHARD_CHECK(
      options_.slots_on_demand,
      usage,
      "expected RuntimeOptions::slots_on_demand for set_max_grad_slots, got an "
      "arena, which is planned before the first step");
  scheduler_.set_max_grad_slots(max_grad_slots);
}

void Runtime::set_sync_gradients(bool sync) {
  const std::lock_guard lock(mutex_);
  sync_gradients_ = sync;
  feed(
      {.kind = EventKind::microbatch,
       .is_last = is_last_microbatch_,
       .sync = sync});
}

UnitId Runtime::unit_of(const nn::Module& module) const {
  for (const auto& unit : units_) {
    if (unit->module() == &module) {
      return unit->id();
    }
  }
  throw Error(
      ErrorCode::usage,
      fmt::format(
          "expected the root or a module of FullyShardOptions::units or "
          "unit_choices, got a {} that is none of them; its weights belong to "
          "the closest unit around it",
          module.name()));
}

std::vector<ParamGroup*> Runtime::groups() const {
  std::vector<ParamGroup*> groups = all_groups();
  std::erase_if(groups, [](const ParamGroup* g) { return !g->trainable(); });
  return groups;
}

std::vector<ParamGroup*> Runtime::all_groups() const {
  std::vector<ParamGroup*> groups;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      groups.push_back(group.get());
    }
  }
  return groups;
}

void Runtime::zero_grad() {
  for (ParamGroup* group : groups()) {
    group->gradients().zero();
  }
}

void Runtime::reset() {
  const std::lock_guard lock(mutex_);
  reset_locked();
}

void Runtime::reset_locked() {
  events_.reset();
  if (strict_) {
    strict_->reset();
  }
  failure_.clear();
  for (const Action& action : decide({.kind = EventKind::reset})) {
    record(action);
  }
  by_hand_.assign(units_.size(), false);
  executor_.reset();
  graph_reads_weights_ = false;
  hide_all();
  zero_grad();
  observers_.tell([](RuntimeObserver& o) { o.was_reset(); });
  seen_generation_ = -1;  // refreshes that failed are done again
  feed(
      {.kind = EventKind::microbatch,
       .is_last = is_last_microbatch_,
       .sync = sync_gradients_});
}

void Runtime::reset_after_failure() {
  const auto all = groups();
  if (std::any_of(all.begin(), all.end(), [](const ParamGroup* group) {
        return group->gradients().reduced().exists() ||
               group->gradients().has_unreduced();
      })) {
    log_warning(
        "step {}: the gradients of this step are dropped, because {} failed",
        executor_.step(),
        failure_.empty() ? "a backward" : failure_);
  }
  reset_locked();
}

void Runtime::synchronize() {
  executor_.streams().synchronize();
  current_stream(mesh_->device())->synchronize();
  mesh_->check();
}

RuntimeTrace Runtime::trace() const {
  const std::lock_guard lock(mutex_);
  return trace_;
}

void Runtime::clear_trace() {
  const std::lock_guard lock(mutex_);
  trace_ = {};
}

// -- actions -----------------------------------------------------------------

void Runtime::feed(const ScheduleEvent& event) {
  if (!failure_.empty()) {
    return;  // units and scheduler disagree until the reset
  }
  const OutsideOfTransforms outside;
  try {
    for (const Action& action : decide(event)) {
      record(action);
      executor_.execute(action);
      if (action.kind == ActionKind::reduce) {
        executor_.tell_reduced(*units_[action.unit]);
      }
    }
  } catch (const std::exception& e) {
    failure_ = e.what();
    throw;
  }
}

std::vector<Action> Runtime::decide(const ScheduleEvent& event) {
  if (options_.trace) {
    trace_.events.push_back(event);
  }
  return scheduler_.on(event);
}

void Runtime::record(const Action& action) {
  if (step_actions_.size() < kMaxStepActions) {
    step_actions_.push_back(action);
  }
  if (options_.trace) {
    trace_.actions.push_back(action);
  }
}

void Runtime::reveal(Unit& unit) {
  if (executor_.has_weights(unit)) {
    unit.pointers().reveal();
  }
}

void Runtime::hide(Unit& unit) {
  if (!events_.is_open(unit.id()) && !by_hand_[unit.id()] &&
      !events_.in_task() && !graph_reads_weights_) {
    unit.pointers().hide();
  }
}

void Runtime::hide_all() {
  for (const auto& unit : units_) {
    hide(*unit);
  }
}

}  // namespace flatshard
