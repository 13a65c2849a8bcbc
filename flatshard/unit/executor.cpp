#include "flatshard/unit/executor.h"

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/memory.h"
#include "flatshard/unit/poison.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {

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
      pool_(mesh_->device()) {
  bool has_outer = false;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      offloads_ |= group->options().offload;
      has_outer |= group->trainable() && group->gradients().has_outer_stage();
    }
  }
  StreamOptions stream = options.streams;
  stream.high_priority = true;
  const auto next_stream = [&](const char* name) {
    auto made = make_stream(mesh_->device(), name, stream);
    stream.delay_seed += 1;
    return made;
  };
  gather_stream_ = next_stream("gather");
  reduce_stream_ = next_stream("reduce");
  outer_stream_ = has_outer ? next_stream("outer") : nullptr;
  exposed_ = make_stream_timer(mesh_->device());
  if (options.debug.poison) {
    poison_parameters();
  }
}

Executor::HeldSlots Executor::held_slots(const Unit& unit) const {
  const UnitState& held = states_[unit.id()];
  return {.weights = view(held.weights), .grads = view(held.grads)};
}

Executor::~Executor() {
  try {
    synchronize();
  } catch (const std::exception& e) {
    if (!mesh_->has_verdict()) {  // that was thrown before
      log_error("while a runtime was destroyed: {}", e.what());
    }
  }
}

void Executor::plan_slots(
    std::span<const UnitSpec> specs,
    std::span<const Action> actions) {
  std::vector<SlotLifetime> lifetimes;
  if (!options_.slots_on_demand) {
    lifetimes = slot_lifetimes(specs, actions);
  }
  plan_ = SlotPlan::build(lifetimes);
  pool_.set_arena(plan_.arena_nbytes());
  planned_dynamic_ = pool_.num_dynamic();
  observers_.tell(
      [&](RuntimeObserver& o) { o.slots_planned(plan_, lifetimes); });
}

bool Executor::should_replan() const {
  return !options_.slots_on_demand && pool_.num_dynamic() > planned_dynamic_ &&
         pool_.num_held() == 0;
}

std::shared_ptr<Stream> Executor::compute() const {
  return current_stream(mesh_->device());
}

void Executor::for_all_streams(
    const std::function<void(Stream&)>& function) const {
  for (const auto& stream : {gather_stream_, reduce_stream_, outer_stream_}) {
    if (stream != nullptr) {
      function(*stream);
    }
  }
}

void Executor::synchronize() {
  for_all_streams([](Stream& stream) { stream.synchronize(); });
}

void Executor::synchronize_reductions() {
  for (const auto& stream : {reduce_stream_, outer_stream_}) {
    if (stream != nullptr) {
      stream->synchronize();
    }
  }
}

void Executor::reset() {
  // What failed may have left a stream with its error, and units half way
  // between two actions: everything is laid to rest by hand.
  reduced_groups_.clear();
  for_all_streams([](Stream& stream) { stream.reset(); });
  mesh_->restart_communicators();
  all_reduced_ = {};
  all_outer_reduced_ = {};
  for (Drained& drained : drained_) {
    drained.last_use = {};  // it would repeat the error
  }
  release_drained();
  pool_.forget_uses();
  for (const auto& unit : units_) {
    rest(*unit);
  }
}

void Executor::execute(const Action& action) {
  try {
    switch (action.kind) {
      case ActionKind::gather:
        gather(*units_[action.unit], action.plane, action.phase);
        break;
      case ActionKind::await:
        await(*units_[action.unit]);
        break;
      case ActionKind::release:
        release(*units_[action.unit]);
        break;
      case ActionKind::acquire_grads:
        // On demand at the first write: the root's would come back to where the
        // logits are.
        if (!options_.slots_on_demand &&
            units_[action.unit]->writes_in_place()) {
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
    }
  } catch (const Error& e) {
    throw e.with_context(context(action));
  } catch (const std::exception& e) {
    throw Error(ErrorCode::comm, e.what(), context(action));
  }
}

void Executor::join() {
  for (const Event* last : {&all_reduced_, &all_outer_reduced_}) {
    compute_waits(*last);
    if (offloads_) {
      last->synchronize();  // who reads these gradients is the host
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
      fences ? group->weights().wait_for_readers()
             : group->weights().wait_for_uploads();
    }
  }
}

void Executor::wait_for_written_weights() {
  const auto stream = compute();
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      if (group->weights().resident() && !group->weights().has_refresh()) {
        group->weights().wait_for_weights(*stream);
      }
    }
  }
}

std::string Executor::context(const Action& action) const {
  std::string text =
      fmt::format("rank {}/{} | step {}", mesh_->rank(), mesh_->size(), step_);
  if (action.unit != kNoUnit) {
    text += fmt::format(" | unit {}", units_[action.unit]->name());
  }
  return fmt::format("{} | {}", text, to_string(action.kind));
}

void Executor::gather(Unit& unit, PlaneId plane, Phase phase) {
  FLATSHARD_CHECK(
      plane == Unit::kComputePlane,
      internal,
      "unit {} has one plane, got a gather of plane {}",
      unit.name(),
      plane);
  // Who unshards by hand may write next, which no forward or backward fences.
  const CopyEngines::Gathers asked = options_.copy_engines.gathers;
  const bool copy_engines =
      !(by_hand_ && options_.foreign_writes) &&
      (asked == CopyEngines::Gathers::all ||
       (asked == CopyEngines::Gathers::forward && phase == Phase::forward));
  std::vector<WeightPlanes::Gather> gathers;
  gathers.reserve(unit.groups().size());
  for (const auto& group : unit.groups()) {
    gathers.push_back(group->weights().plan_gather(copy_engines));
    if (gathers.back().is_first) {
      group->weights().wait_for_weights(*gather_stream_);
    }
  }
  UnitState& held = state(unit);
  SlotView slot;
  if (!unit.resident()) {
    const SlotKey key{
        .unit = unit.id(),
        .plane = plane,
        .role = phase == Phase::forward ? SlotRole::forward_weights
                                        : SlotRole::backward_weights};
    held.weights =
        pool_.acquire(plan_.offset(key), unit.weights_nbytes(), gather_stream_);
    slot = view(held.weights);
    held.last[static_cast<std::size_t>(key.role)] = slot;
    observers_.tell(
        [&](RuntimeObserver& o) { o.slot_acquired(unit, key, held.weights); });
  }
  gather_stream_->submit(
      [&unit, slot, gathers = std::move(gathers), step = step_] {
        const CollectiveScope scope(step, unit.name());
        unit.gather_into(slot, gathers);
      });
  held.gathered.record(*gather_stream_);
}

void Executor::compute_waits(const Event& event) {
  if (!event.recorded()) {
    return;
  }
  const auto stream = compute();
  if (measures_) {
    exposed_->start();
  }
  event.wait(*stream);
  if (measures_) {
    exposed_->stop();
  }
}

void Executor::await(Unit& unit) {
  UnitState& held = state(unit);
  compute_waits(held.gathered);
  held.awaited = true;
  const SlotView slot = view(held.weights);
  unit.point_at(slot);
  observers_.tell(
      [&](RuntimeObserver& o) { o.parameters_pointed(unit, slot); });
}

void Executor::release(Unit& unit) {
  UnitState& held = state(unit);
  unit.clear();
  const auto stream = compute();
  if (!held.awaited) {
    held.gathered.wait(*stream);  // a prefetch that nobody used
  }
  held.awaited = false;
  observers_.tell(
      [&](RuntimeObserver& o) { o.slot_released(unit, held.weights); });
  if (options_.debug.poison) {
    fill_with_nan(view(held.weights));
  }
  Event last_use;
  last_use.record(*stream);
  pool_.release(held.weights, last_use, gather_stream_);
}

SlotView Executor::grads_slot(Unit& unit) {
  UnitState& held = state(unit);
  if (!held.grads.held()) {
    release_drained();
    const SlotKey key{.unit = unit.id(), .role = SlotRole::gradients};
    held.grads =
        pool_.acquire(plan_.offset(key), unit.grads_nbytes(), compute());
    observers_.tell(
        [&](RuntimeObserver& o) { o.slot_acquired(unit, key, held.grads); });
    held.last[static_cast<std::size_t>(SlotRole::gradients)] = view(held.grads);
  }
  return view(held.grads);
}

void Executor::reduce(Unit& unit, bool collective, bool is_last) {
  UnitState& held = state(unit);
  if (held.reduced.recorded() && observers_.want_reduced_gradients(unit)) {
    held.reduced.wait(*compute());
  }
  const SlotView slot = grads_slot(unit);
  unit.finish_grads(slot);
  observers_.tell([&](RuntimeObserver& o) { o.gradients_ready(unit, slot); });
  std::vector<Planned> planned;
  for (std::size_t g = 0; g < unit.groups().size(); ++g) {
    ParamGroup& group = *unit.groups()[g];
    if (group.trainable()) {
      planned.push_back(
          {.group = &group,
           .flat = unit.grad_flat(slot, g),
           .reduction = group.plan_reduction(collective, is_last)});
      const GradientPipeline::Reduction& r = planned.back().reduction;
      if (r.collective && !r.to_inner) {
        reduced_groups_.emplace_back(&group, !r.add_reduced);
      }
      if (r.by_outer) {
        planned.back().inner = std::make_shared<at::Tensor>();
      }
    }
  }
  Event filled;
  filled.record(*compute());
  filled.wait(*reduce_stream_);
  for (const Planned& p : planned) {
    reduce_stream_->submit([&unit, p, step = step_] {
      const CollectiveScope scope(step, unit.name());
      const at::Tensor inner =
          p.group->gradients().reduce_inner(p.flat, p.reduction);
      if (p.inner != nullptr) {
        *p.inner = inner;
      }
    });
  }
  held.grads_read.record(*reduce_stream_);
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
  held.grads_read.wait(*outer_stream_);
  for (const Planned& p : planned) {
    if (p.inner == nullptr) {
      continue;
    }
    outer_stream_->submit([&unit, p, step = step_] {
      const CollectiveScope scope(step, unit.name());
      keep_for_current_stream(*p.inner);
      p.group->gradients().reduce_outer(*p.inner, p.reduction);
      p.inner->reset();
    });
  }
  held.reduced = {};
  held.reduced.record(*outer_stream_);
  all_outer_reduced_ = held.reduced;
  if (std::any_of(planned.begin(), planned.end(), [](const Planned& p) {
        return p.reduction.outer_reads_slot;
      })) {
    held.grads_read = held.reduced;
  }
}

void Executor::tell_reduced(Unit& unit) {
  if (unit.has_unreduced_grad() || !observers_.want_reduced_gradients(unit)) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto tell = [&] {
    observers_.tell([&](RuntimeObserver& o) { o.gradients_reduced(unit); });
  };
  Event& reduced = state(unit).reduced;
  if (!mesh_->device().is_cuda() || offloads_) {
    reduced.synchronize();
    tell();
    return;
  }
  // After the unit's reduction, wherever that ended.
  reduced.wait(*reduce_stream_);
  reduce_stream_->submit(tell);
  reduced.record(*reduce_stream_);
  all_reduced_ = reduced;
}

void Executor::drop_unused_grads() {
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
      *of_all = flags.to(device, /*non_blocking=*/true);
      world.all_reduce(*of_all, ReduceOp::sum);
    });
    Event done;
    done.record(*reduce_stream_);
    // As all reductions: another runtime may use the communicator next.
    done.wait(*compute());
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

void Executor::drain(Unit& unit) {
  UnitState& held = state(unit);
  if (!held.grads.held()) {
    return;  // nobody wrote it
  }
  Event last_use =
      options_.debug.poison ? poison_after_reduction(unit) : held.grads_read;
  drained_.push_back(
      {&unit, std::exchange(held.grads, {}), std::move(last_use)});
  if (!options_.slots_on_demand) {
    release_drained();
  }
}

void Executor::release_drained() {
  for (Drained& drained : std::exchange(drained_, {})) {
    observers_.tell([&](RuntimeObserver& o) {
      o.slot_released(*drained.unit, drained.slot);
    });
    pool_.release(drained.slot, std::move(drained.last_use), compute());
  }
}

void Executor::rest(Unit& unit) {
  const auto stream = compute();
  unit.drop_grads();
  unit.clear();
  UnitState& held = state(unit);
  held.awaited = false;
  held.gathered = {};
  held.grads_read = {};
  held.reduced = {};
  for (const auto& group : unit.groups()) {
    group->weights().mark_stale();
  }
  // The communication streams are idle.
  const auto give_back = [&](Slot& slot,
                             const std::shared_ptr<Stream>& filler) {
    if (!slot.held()) {
      return;
    }
    observers_.tell([&](RuntimeObserver& o) { o.slot_released(unit, slot); });
    if (options_.debug.poison) {
      fill_with_nan(view(slot));
    }
    Event last_use;
    last_use.record(*stream);
    pool_.release(slot, last_use, filler);
  };
  give_back(held.weights, gather_stream_);
  give_back(held.grads, stream);
}

}  // namespace flatshard
