#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace flatshard {
namespace {

// Units in the order of their forwards' ends: children before parents.
void append_ends(
    const std::vector<UnitSpec>& units,
    UnitId parent,
    std::vector<UnitId>& ends) {
  for (UnitId u = 0; u < static_cast<UnitId>(units.size()); ++u) {
    if (units[u].parent == parent) {
      append_ends(units, u, ends);
      ends.push_back(u);
    }
  }
}

void check_planes(const UnitSpec& unit) {
  const auto num_planes = static_cast<PlaneId>(unit.weights_nbytes.size());
  FLATSHARD_CHECK(
      unit.num_slices() <= PlaneSet::kMaxPlanes,
      internal,
      "unit {}: expected at most {} planes and parts, got {}",
      unit.name,
      PlaneSet::kMaxPlanes,
      unit.num_slices());
  for (const PlaneSet reads :
       {unit.forward_reads, unit.backward_reads, unit.on_request}) {
    if (reads == PlaneSet::all() && unit.post_forward == kNoPlane) {
      continue;
    }
    reads.for_each([&](PlaneId plane) {
      FLATSHARD_CHECK(
          plane < num_planes,
          internal,
          "unit {} reads plane {}, but has {}",
          unit.name,
          plane,
          num_planes);
      FLATSHARD_CHECK(
          plane != unit.post_forward,
          internal,
          "unit {}: plane {} contains slices of plane 0, and no kernel can "
          "read it",
          unit.name,
          plane);
    });
  }
  for (PlaneId plane = 0; plane < num_planes; ++plane) {
    const PlaneId source = unit.source(plane);
    FLATSHARD_CHECK(
        source == kStored ||
            (source >= 0 && source < plane && unit.source(source) == kStored &&
             unit.num_parts(source) == unit.num_parts(plane)),
        internal,
        "unit {}: expected plane {} to be derived from a lower plane that is "
        "all-gathered and has the same number of parts, got {}",
        unit.name,
        plane,
        source);
  }
}

}  // namespace

Scheduler::Scheduler(std::vector<UnitSpec> units, SchedulerOptions options)
    : units_(std::move(units)),
      options_(options),
      state_(units_.size()),
      has_children_(units_.size(), false) {
  FLATSHARD_CHECK(
      options_.prefetch >= 0,
      config,
      "expected prefetch >= 0, got {}",
      options_.prefetch);
  set_max_grad_slots(options_.max_grad_slots);
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    root_order_.push_back(u);
    const UnitId parent = units_[u].parent;
    FLATSHARD_CHECK(
        parent < u,
        internal,
        "unit {} is registered before its parent {}",
        u,
        parent);
    if (parent != kNoUnit) {
      has_children_[parent] = true;
    }
    all_resident_ = all_resident_ && units_[u].resident;
    check_planes(units_[u]);
  }
  append_ends(units_, kNoUnit, backward_order_);
  std::reverse(backward_order_.begin(), backward_order_.end());
}

void Scheduler::set_max_grad_slots(int max_grad_slots) {
  FLATSHARD_CHECK(
      max_grad_slots >= 1,
      config,
      "expected at least 1 gradient slot, got {}",
      max_grad_slots);
  options_.max_grad_slots = max_grad_slots;
}

std::vector<Action> Scheduler::on(const ScheduleEvent& event) {
  Actions out;
  switch (event.kind) {
    case EventKind::forward_begin:
      forward_begin(event, out);
      break;
    case EventKind::forward_end:
      forward_end(event, out);
      break;
    case EventKind::recompute_begin:
      recompute_begin(event, out);
      break;
    case EventKind::recompute_end:
      recompute_end(event, out);
      break;
    case EventKind::task_begin:
      task_begin(event);
      break;
    case EventKind::backward_begin:
      backward_begin(event, out);
      break;
    case EventKind::wgrad_done:
      wgrad_done(event, out);
      break;
    case EventKind::wgrad_deferred:
      wgrad_deferred(event, out);
      break;
    case EventKind::inputs_done:
      inputs_done(event, out);
      break;
    case EventKind::task_end:
      task_end(event, out);
      break;
    case EventKind::read:
      read(event, out);
      break;
    case EventKind::kept_read:
      kept_read(event, out);
      break;
    case EventKind::kept_done:
      kept_done(event, out);
      break;
    case EventKind::weights_changed:
      weights_changed(out);
      break;
    case EventKind::unit_written:
      unit_written(event.unit, out);
      break;
    case EventKind::unshard:
      unshard(event, out);
      break;
    case EventKind::reshard:
      reshard(event, out);
      break;
    case EventKind::microbatch:
      next_ = {.is_last = event.is_last, .sync = event.sync};
      break;
    case EventKind::reset:
      reset(out);
      break;
  }
  return out;
}

void Scheduler::check_exists(UnitId unit) const {
  FLATSHARD_CHECK(
      unit >= 0 && unit < std::ssize(units_),
      usage,
      "a policy names unit {}, but the model has {} units",
      unit,
      units_.size());
}

void Scheduler::set_policy(UnitId unit, UnitPolicy policy) {
  check_exists(unit);
  for (const auto& list : {policy.forward_prefetch, policy.backward_prefetch}) {
    for (const UnitId named : list.value_or(std::vector<UnitId>())) {
      check_exists(named);
    }
  }
  units_[unit].policy = std::move(policy);
}

const UnitPolicy& Scheduler::policy(UnitId unit) const {
  check_exists(unit);
  return units_[unit].policy;
}

void Scheduler::weights_changed(Actions& out) {
  path_ended_ = true;
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    FLATSHARD_CHECK(
        !in_forward(u) && state_[u].backward_calls.empty(),
        usage,
        "the weights of unit {} changed while its forward or backward runs; "
        "step the optimizer between them",
        units_[u].name);
    state_[u].read_by_graph = false;
    release(u, PlaneSet::all(), out);
    state_[u].present = {};  // weights that stay unsharded: again, in the
                             // same place
    state_[u].awaited = {};
  }
}

// Weights that were unsharded ahead, or kept, are older. Weights that a forward
// or backward of the unit computes with stay until that ends.
void Scheduler::unit_written(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  if (!in_forward(unit) && state.open_recomputes == 0 &&
      state.backward_calls.empty()) {
    state.read_by_graph = false;
    release(unit, PlaneSet::all(), out);
    state.present = {};
    state.awaited = {};
  }
}

void Scheduler::unshard(const ScheduleEvent& event, Actions& out) {
  const PlaneSet planes = wanted(event.unit, Phase::forward);
  const auto first = static_cast<std::ptrdiff_t>(out.size());
  gather(event.unit, planes, Phase::forward, out);
  std::for_each(out.begin() + first, out.end(), [&](Action& action) {
    action.by_program = event.by_program;
  });
  if (event.awaits) {
    await(event.unit, planes, out);
  }
  state_[event.unit].holds.by_program = !state_[event.unit].present.empty();
}

void Scheduler::reshard(const ScheduleEvent& event, Actions& out) {
  const UnitState& state = state_[event.unit];
  if (!in_forward(event.unit) && state.open_recomputes == 0 &&
      state.backward_calls.empty()) {
    release(event.unit, PlaneSet::all(), out);
  }
}

void Scheduler::reset(Actions& out) {
  open_forwards_.clear();
  outer_calls_.clear();
  path_ended_ = true;
  tasks_.clear();
  unreduced_tasks_.clear();
  interleaved_ = false;
  due_.clear();
  for (const Kept& kept : std::exchange(kept_, {})) {
    out.push_back(
        {.kind = ActionKind::release_kept,
         .unit = kept.unit,
         .call = kept.call});
  }
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    UnitState& state = state_[u];
    state.open_recomputes = 0;
    state.read_by_graph = false;
    state.backward_calls.clear();
    if (fills_grads(u)) {
      out.push_back({ActionKind::drain, u});
    }
    release(u, PlaneSet::all(), out);
  }
  grad_queue_.clear();
  drain_down_to(0, out);
  out.push_back({ActionKind::join});
}

std::size_t Scheduler::position_after(
    const std::vector<UnitId>& order,
    std::size_t from,
    UnitId unit) {
  auto found = std::find(order.begin() + from, order.end(), unit);
  if (found == order.end()) {
    found = std::find(order.begin(), order.end(), unit);
  }
  return found == order.end() ? order.size() : found - order.begin() + 1;
}

std::vector<UnitId> Scheduler::ahead(
    const std::vector<UnitId>& order,
    std::size_t position,
    const std::optional<std::vector<UnitId>>& chosen,
    Phase phase) const {
  std::vector<UnitId> units;
  const auto wanted = [&](UnitId unit) {
    // Resident weights need no all-gather: ahead of its backward such a unit
    // would only derive planes, and keep them for longer.
    return !units_[unit].reads(phase).empty() &&
           (phase == Phase::forward ||
            (units_[unit].policy.unshard_in_backward &&
             !units_[unit].resident));
  };
  if (chosen) {
    std::copy_if(
        chosen->begin(),
        chosen->end(),
        std::back_inserter(units),
        wanted);
    return units;
  }
  if (phase == Phase::backward && all_resident_) {
    return units;  // else all of them would be looked at, for each unit
  }
  for (std::size_t i = position; i < order.size(); ++i) {
    if (static_cast<int>(units.size()) >= options_.prefetch) {
      break;
    }
    const bool runs_now = position > 0 && order[i] == order[position - 1];
    if (wanted(order[i]) && !runs_now) {
      units.push_back(order[i]);
    }
  }
  return units;
}

void Scheduler::prefetch(
    const std::vector<UnitId>& units,
    Phase phase,
    Actions& out) {
  for (const UnitId unit : units) {
    PlaneSet slices = wanted(unit, phase);
    if (phase == Phase::backward) {
      const Asked& asked = state_[unit].learned;
      slices = slices | learned(unit, asked.in_recompute | asked.in_backward);
    }
    gather(unit, slices, phase, out);
    (phase == Phase::forward ? state_[unit].holds.ahead_of_forward
                             : state_[unit].holds.ahead_of_backward) = true;
  }
}

bool Scheduler::in_forward(UnitId unit) const {
  return std::find(open_forwards_.begin(), open_forwards_.end(), unit) !=
         open_forwards_.end();
}

bool Scheduler::resting() const {
  return busy_units().empty();
}

std::vector<std::string> Scheduler::busy_units() const {
  std::vector<std::string> names;
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    const UnitState& state = state_[u];
    const bool gathered =
        !(state.present - units_[u].resting() - kept_planes(u)).empty() &&
        !state.holds.by_program;
    if (gathered || in_forward(u) || !state.backward_calls.empty() ||
        fills_grads(u)) {
      names.push_back(units_[u].name);
    }
  }
  return names;
}

int Scheduler::num_gathered() const {
  int gathered = 0;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    PlaneSet slice;
    if (units_[u].post_forward != kNoPlane) {
      slice.insert(units_[u].post_forward);
    }
    gathered += (state_[u].present - slice).empty() ? 0 : 1;
  }
  return gathered;
}

}  // namespace flatshard
