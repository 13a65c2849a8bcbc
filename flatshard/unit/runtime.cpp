#include "flatshard/unit/runtime.h"
#include "flatshard/comm/collective_scope.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/nn/module.h"
#include "flatshard/schedule/keep_units.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/unit/poison.h"
#include "flatshard/unit/runtime_call.h"

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
      pool_(mesh_->device()) {
  StreamOptions gather = options.streams;
  gather.high_priority = true;
  gather_stream_ = make_stream(mesh_->device(), "gather", gather);
  StreamOptions reduce = options.streams;
  reduce.high_priority = true;
  reduce.delay_seed += 1;
  reduce_stream_ = make_stream(mesh_->device(), "reduce", reduce);
  exposed_ = make_stream_timer(mesh_->device());
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      offloads_ |= group->options().offload;
    }
  }
  if (options.debug.poison) {
    poison_parameters();
  }
  plan_slots(simulate_step(scheduler_.units(), scheduler_.options()));
}

std::shared_ptr<Runtime> Runtime::create(
    std::shared_ptr<Mesh> mesh,
    std::vector<std::unique_ptr<Unit>> units,
    std::vector<UnitId> parents,
    RuntimeOptions options) {
  std::shared_ptr<Runtime> runtime(new Runtime(
      std::move(mesh),
      std::move(units),
      std::move(parents),
      options));
  runtime->install_hooks();
  runtime->hide_all();
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
    gather_stream_->synchronize();
    reduce_stream_->synchronize();
  } catch (const std::exception& e) {
    if (!mesh_->has_verdict()) {  // that was thrown before
      log_error("while a runtime was destroyed: {}", e.what());
    }
  }
  for (auto& unit : units_) {
    for (UnitParameter& p : unit->parameters()) {
      if (p.accumulator && p.hook_id != 0) {
        p.accumulator->del_post_hook(p.hook_id);
      }
      // The memory goes with this object. Python's units say so themselves.
      unit->module() != nullptr ? p.storage.retire() : p.storage.clear();
    }
  }
}

void Runtime::plan_slots(const std::vector<Action>& actions) {
  std::vector<SlotLifetime> lifetimes;
  if (!options_.slots_on_demand) {
    lifetimes = slot_lifetimes(scheduler_.units(), actions);
  }
  plan_ = SlotPlan::build(lifetimes);
  pool_.set_arena(plan_.arena_nbytes());
  planned_dynamic_ = pool_.num_dynamic();
  observe([&](RuntimeObserver& o) { o.slots_planned(plan_, lifetimes); });
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

void Runtime::set_policy(UnitId unit, UnitPolicy policy) {
  const std::lock_guard lock(mutex_);
  scheduler_.set_policy(unit, std::move(policy));
}

int Runtime::keep_gathered(std::int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto kept =
      choose_kept_units(scheduler_.units(), scheduler_.options(), nbytes);
  for (const UnitId unit : kept) {
    UnitPolicy policy = scheduler_.units()[unit].policy;
    policy.reshard_after_forward = false;
    scheduler_.set_policy(unit, std::move(policy));
  }
  plan_slots(simulate_step(scheduler_.units(), scheduler_.options()));
  return static_cast<int>(kept.size());
}

void Runtime::unshard(UnitId unit, bool awaits) {
  const std::lock_guard lock(mutex_);
  if (open_calls_.empty() && tasks_.empty()) {
    before_root_forward();
  }
  unshards_ = true;
  const auto done = c10::make_scope_exit([&] { unshards_ = false; });
  feed({.kind = EventKind::unshard, .unit = unit, .awaits = awaits});
  if (awaits) {
    units_[unit]->by_hand = true;
    reveal(*units_[unit]);
  }
}

void Runtime::prefetch_forward() {
  const std::lock_guard lock(mutex_);
  std::vector<UnitId> first;
  for (const Action& action : step_actions_) {
    if (action.kind == ActionKind::gather &&
        static_cast<int>(first.size()) <= options_.prefetch &&
        std::find(first.begin(), first.end(), action.unit) == first.end()) {
      first.push_back(action.unit);
    }
  }
  if (first.empty() || !open_calls_.empty() || !tasks_.empty()) {
    return;
  }
  before_root_forward();
  for (const UnitId unit : first) {
    feed({.kind = EventKind::unshard, .unit = unit, .awaits = false});
  }
}

void Runtime::reshard(UnitId unit) {
  const std::lock_guard lock(mutex_);
  feed({.kind = EventKind::reshard, .unit = unit});
  units_[unit]->by_hand = false;
  hide(*units_[unit]);
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
  tasks_.clear();
  open_calls_.clear();
  watched_.clear();
  reduced_groups_.clear();
  if (strict_) {
    strict_->reset();
  }
  // What failed may have left a stream with its error, and units half way
  // between two actions: everything is laid to rest by hand.
  gather_stream_->reset();
  reduce_stream_->reset();
  mesh_->restart_communicators();
  all_reduced_ = {};
  for (Drained& drained : drained_) {
    drained.last_use = {};  // it would repeat the error
  }
  release_drained();
  pool_.forget_uses();
  failure_.clear();
  for (const Action& action : decide({.kind = EventKind::reset})) {
    record(action);
  }
  for (auto& unit : units_) {
    unit->by_hand = false;
    rest(*unit);
  }
  graph_reads_weights_ = false;
  hide_all();
  zero_grad();
  observe([](RuntimeObserver& o) { o.was_reset(); });
  seen_generation_ = -1;  // refreshes that failed are done again
  feed(
      {.kind = EventKind::microbatch,
       .is_last = is_last_microbatch_,
       .sync = sync_gradients_});
}

void Runtime::reset_after_failure() {
  const auto all = groups();
  if (std::any_of(all.begin(), all.end(), [](const ParamGroup* group) {
        return group->gradients().has_reduced() ||
               group->gradients().has_unreduced();
      })) {
    log_warning(
        "step {}: the gradients of this step are dropped, because {} failed",
        step_,
        failure_.empty() ? "a backward" : failure_);
  }
  reset_locked();
}

void Runtime::synchronize() {
  gather_stream_->synchronize();
  reduce_stream_->synchronize();
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

void Runtime::feed(ScheduleEvent event) {
  if (!failure_.empty()) {
    return;  // units and scheduler disagree until the reset
  }
  try {
    for (const Action& action : decide(event)) {
      execute(action);
      if (action.kind == ActionKind::reduce) {
        tell_reduced(*units_[action.unit]);
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

void Runtime::execute(const Action& action) {
  record(action);
  try {
    switch (action.kind) {
      case ActionKind::gather:
        gather(*units_[action.unit], action.phase);
        break;
      case ActionKind::await:
        await(*units_[action.unit]);
        break;
      case ActionKind::release:
        release(*units_[action.unit]);
        break;
      case ActionKind::acquire_grads:
        break;  // at the first write
      case ActionKind::reduce:
        reduce(*units_[action.unit], true);
        break;
      case ActionKind::accumulate:
        reduce(*units_[action.unit], false);
        break;
      case ActionKind::drain:
        drain(*units_[action.unit]);
        break;
      case ActionKind::join:
        compute_waits(all_reduced_);
        release_drained();
        if (offloads_) {
          all_reduced_.synchronize();  // who reads these gradients is the host
        }
        break;
    }
  } catch (const Error& e) {
    throw e.with_context(context(action));
  } catch (const std::exception& e) {
    throw Error(ErrorCode::comm, e.what(), context(action));
  }
}

std::string Runtime::context(const Action& action) const {
  std::string text =
      fmt::format("rank {}/{} | step {}", mesh_->rank(), mesh_->size(), step_);
  if (action.unit != kNoUnit) {
    text += fmt::format(" | unit {}", units_[action.unit]->name());
  }
  return fmt::format("{} | {}", text, to_string(action.kind));
}

void Runtime::gather(Unit& unit, Phase phase) {
  // Who unshards by hand may write next, which no forward or backward fences.
  const bool copies = !(unshards_ && options_.others_write) &&
                      (options_.copy_gathers == CopyGathers::all ||
                       (options_.copy_gathers == CopyGathers::forward &&
                        phase == Phase::forward));
  std::vector<WeightPlanes::Gather> gathers;
  gathers.reserve(unit.groups().size());
  for (const auto& group : unit.groups()) {
    gathers.push_back(group->weights().plan_gather(copies));
    if (gathers.back().is_first) {
      group->weights().wait_for_weights(*gather_stream_);
    }
  }
  void* slot = nullptr;
  if (!unit.resident()) {
    const SlotRole role = phase == Phase::forward ? SlotRole::forward_weights
                                                  : SlotRole::backward_weights;
    unit.weights_slot = pool_.acquire(
        plan_.offset({unit.id(), role}),
        unit.weights_nbytes(),
        gather_stream_);
    slot = unit.weights_slot.data;
    observe([&](RuntimeObserver& o) {
      o.slot_acquired(unit, role, unit.weights_slot);
    });
  }
  gather_stream_->submit(
      [&unit, slot, gathers = std::move(gathers), step = step_] {
        const CollectiveScope scope(step, unit.name());
        unit.gather_into(slot, gathers);
      });
  unit.gathered.record(*gather_stream_);
}

void Runtime::compute_waits(const Event& event) {
  const auto compute = current_stream(mesh_->device());
  if (measure_exposed_) {
    exposed_->start();
  }
  event.wait(*compute);
  if (measure_exposed_) {
    exposed_->stop();
  }
}

double Runtime::wait_and_take_exposed_ms() {
  return exposed_->wait_and_take_ms();
}

void Runtime::await(Unit& unit) {
  compute_waits(unit.gathered);
  unit.awaited = true;
  unit.point_at(unit.weights_slot.data);
  observe([&](RuntimeObserver& o) { o.parameters_pointed(unit); });
}

void Runtime::release(Unit& unit) {
  unit.clear();
  const auto compute = current_stream(mesh_->device());
  if (!unit.awaited) {
    unit.gathered.wait(*compute);  // a prefetch that nobody used
  }
  unit.awaited = false;
  observe(
      [&](RuntimeObserver& o) { o.slot_released(unit, unit.weights_slot); });
  if (options_.debug.poison) {
    const Slot& slot = unit.weights_slot;
    fill_with_nan(slot.data, slot.nbytes, mesh_->device());
  }
  Event last_use;
  last_use.record(*compute);
  pool_.release(unit.weights_slot, last_use, gather_stream_);
}

void Runtime::reveal(Unit& unit) {
  if (unit.awaited || unit.resident()) {
    unit.reveal();
  }
}

void Runtime::hide(Unit& unit) {
  const bool is_open =
      std::any_of(open_calls_.begin(), open_calls_.end(), [&](const auto& c) {
        return c->unit == unit.id();
      });
  if (!is_open && !unit.by_hand && tasks_.empty() && !graph_reads_weights_) {
    unit.hide();
  }
}

void Runtime::hide_all() {
  for (const auto& unit : units_) {
    hide(*unit);
  }
}

void* Runtime::grads_slot(Unit& unit) {
  if (!unit.grads_slot.held()) {
    release_drained();
    unit.grads_slot = pool_.acquire(
        plan_.offset({unit.id(), SlotRole::gradients}),
        unit.grads_nbytes(),
        current_stream(mesh_->device()));
    observe([&](RuntimeObserver& o) {
      o.slot_acquired(unit, SlotRole::gradients, unit.grads_slot);
    });
  }
  return unit.grads_slot.data;
}

void Runtime::reduce(Unit& unit, bool collective) {
  if (unit.reduced.recorded() && wants_reduced(unit)) {
    unit.reduced.wait(*current_stream(mesh_->device()));
  }
  void* slot = grads_slot(unit);
  unit.finish_grads(slot);
  observe([&](RuntimeObserver& o) { o.gradients_ready(unit, slot); });
  std::vector<std::pair<std::size_t, GradientPipeline::Reduction>> planned;
  for (std::size_t g = 0; g < unit.groups().size(); ++g) {
    if (unit.groups()[g]->trainable()) {
      planned.emplace_back(
          g,
          unit.groups()[g]->plan_reduction(collective, is_last_microbatch_));
      const GradientPipeline::Reduction& planned_last = planned.back().second;
      if (planned_last.collective && !planned_last.to_inner) {
        reduced_groups_.emplace_back(
            unit.groups()[g].get(),
            !planned_last.add_reduced);
      }
    }
  }
  Event filled;
  filled.record(*current_stream(mesh_->device()));
  filled.wait(*reduce_stream_);
  for (const auto& [g, reduction] : planned) {
    reduce_stream_->submit([&unit,
                            &group = *unit.groups()[g],
                            flat = unit.grad_flat(slot, g),
                            reduction = reduction,
                            step = step_] {
      const CollectiveScope scope(step, unit.name());
      group.gradients().reduce(flat, reduction);
    });
  }
  unit.reduced.record(*reduce_stream_);
  all_reduced_ = unit.reduced;
}

bool Runtime::wants_reduced(const Unit& unit) const {
  return std::any_of(
      observers_.begin(),
      observers_.end(),
      [&](const auto& observer) {
        return observer->wants_reduced_gradients(unit);
      });
}

void Runtime::tell_reduced(Unit& unit) {
  if (unit.has_unreduced_grad() || !wants_reduced(unit)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto tell = [&] {
    observe([&](RuntimeObserver& o) { o.gradients_reduced(unit); });
  };
  if (!mesh_->device().is_cuda() || offloads_) {
    unit.reduced.synchronize();
    tell();
    return;
  }
  reduce_stream_->submit(tell);
  unit.reduced.record(*reduce_stream_);
  all_reduced_ = unit.reduced;
}

void Runtime::forget_unused_grads() {
  const auto reduced = std::exchange(reduced_groups_, {});
  if (!options_.unused_grads_stay_undefined || reduced.empty()) {
    return;
  }
  std::vector<float> had(reduced.size());
  bool in_doubt = false;
  for (std::size_t i = 0; i < reduced.size(); ++i) {
    const auto& [group, is_first] = reduced[i];
    had[i] = group->gradients().contributed() ? 1 : 0;
    in_doubt |= is_first && !group->gradients().contributed();
  }
  at::Tensor flags = at::tensor(had);
  if (mesh_->size() > 1) {
    const auto of_all = std::make_shared<at::Tensor>();
    reduce_stream_->submit([flags,
                            of_all,
                            device = mesh_->device(),
                            &world = mesh_->world(Purpose::reduce),
                            step = step_] {
      const CollectiveScope scope(step, "which gradients there are");
      *of_all = flags.to(device);
      world.all_reduce(*of_all, ReduceOp::sum);
    });
    Event done;
    done.record(*reduce_stream_);
    // As all reductions: another runtime may use the communicator next.
    done.wait(*current_stream(mesh_->device()));
    if (!in_doubt) {
      return;
    }
    flags = of_all->cpu();
  }
  const auto ranks = flags.accessor<float, 1>();
  for (std::size_t i = 0; i < reduced.size(); ++i) {
    const auto& [group, is_first] = reduced[i];
    if (is_first && ranks[static_cast<std::int64_t>(i)] == 0) {
      group->gradients().drop_reduced();
    }
  }
}

void Runtime::drain(Unit& unit) {
  if (!unit.grads_slot.held()) {
    return;  // nobody wrote it
  }
  Event last_use =
      options_.debug.poison ? poison_after_reduction(unit) : unit.reduced;
  drained_.push_back(
      {&unit, std::exchange(unit.grads_slot, {}), std::move(last_use)});
  if (!options_.slots_on_demand) {
    release_drained();
  }
}

void Runtime::release_drained() {
  for (Drained& drained : std::exchange(drained_, {})) {
    observe([&](RuntimeObserver& o) {
      o.slot_released(*drained.unit, drained.slot);
    });
    pool_.release(
        drained.slot,
        std::move(drained.last_use),
        current_stream(mesh_->device()));
  }
}

void Runtime::rest(Unit& unit) {
  const auto compute = current_stream(mesh_->device());
  unit.drop_grads();
  unit.clear();
  unit.awaited = false;
  unit.gathered = {};
  unit.reduced = {};
  for (const auto& group : unit.groups()) {
    group->weights().mark_stale();
  }
  // The communication streams are idle.
  const auto give_back = [&](Slot& slot,
                             const std::shared_ptr<Stream>& filler) {
    if (!slot.held()) {
      return;
    }
    observe([&](RuntimeObserver& o) { o.slot_released(unit, slot); });
    if (options_.debug.poison) {
      fill_with_nan(slot.data, slot.nbytes, mesh_->device());
    }
    Event last_use;
    last_use.record(*compute);
    pool_.release(slot, last_use, filler);
  };
  give_back(unit.weights_slot, gather_stream_);
  give_back(unit.grads_slot, compute);
}

}  // namespace flatshard
