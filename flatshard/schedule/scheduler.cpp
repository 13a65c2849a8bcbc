#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace flatshard {
namespace {

// The position after the next occurrence of `unit`, looking from `from` and
// then from the start; the size when it does not occur.
std::size_t position_after(
    const std::vector<UnitId>& order,
    std::size_t from,
    UnitId unit) {
  auto found = std::find(order.begin() + from, order.end(), unit);
  if (found == order.end()) {
    found = std::find(order.begin(), order.end(), unit);
  }
  return found == order.end() ? order.size() : found - order.begin() + 1;
}

void count_down(std::map<UnitId, int>& counts, UnitId unit) {
  const auto found = counts.find(unit);
  if (found != counts.end() && --found->second == 0) {
    counts.erase(found);
  }
}

// Units in the order in which their forwards end: children before parents.
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
      recompute_end(event);
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
    case EventKind::inputs_done:
      inputs_done(event, out);
      break;
    case EventKind::task_end:
      task_end(event, out);
      break;
    case EventKind::weights_changed:
      weights_changed(out);
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

void Scheduler::set_policy(UnitId unit, UnitPolicy policy) {
  const auto num_units = static_cast<UnitId>(units_.size());
  const auto exists = [&](UnitId u) { return u >= 0 && u < num_units; };
  bool all = exists(unit);
  for (const auto& list : {policy.forward_prefetch, policy.backward_prefetch}) {
    if (list) {
      all = all && std::all_of(list->begin(), list->end(), exists);
    }
  }
  FLATSHARD_CHECK(
      all,
      usage,
      "a policy names a unit that does not exist; there are {}",
      num_units);
  units_[unit].policy = std::move(policy);
}

void Scheduler::forward_begin(const ScheduleEvent& event, Actions& out) {
  const UnitId u = event.unit;
  if (open_forwards_.empty()) {
    outer_forward_begin(u);
  }
  open_forwards_.push_back(u);
  recorded_forward_.push_back(u);
  state_[u].kept = false;
  state_[u].waits = false;
  const std::vector<UnitId>& order = forward_order();
  forward_position_ = position_after(order, forward_position_, u);
  gather(u, Phase::forward, out);
  prefetch(
      ahead(
          order,
          forward_position_,
          units_[u].policy.forward_prefetch,
          Phase::forward),
      Phase::forward,
      out);
  await(u, out);
}

const std::vector<UnitId>& Scheduler::forward_order() const {
  const bool of_path = !is_root(outer_calls_.back()) && !path_order_.empty();
  return of_path ? path_order_ : root_order_;
}

void Scheduler::outer_forward_begin(UnitId u) {
  const bool again = std::find(outer_calls_.begin(), outer_calls_.end(), u) !=
                     outer_calls_.end();
  if (is_root(u) || path_ended_ || again) {
    if (outer_calls_.size() > 1 && !is_root(outer_calls_.front())) {
      path_order_ = recorded_forward_;
    }
    path_ended_ = false;
    forward_position_ = 0;
    outer_calls_.clear();
    recorded_forward_.clear();
    recorded_ends_.clear();
  }
  outer_calls_.push_back(u);
}

void Scheduler::outer_forward_end(UnitId u, bool needs_backward, Actions& out) {
  // Where a path goes on, the next call uses what was prefetched. Who calls a
  // single unit goes on nowhere.
  std::vector<UnitId> next;
  if (!is_root(outer_calls_.front()) &&
      (outer_calls_.size() > 1 || !path_order_.empty())) {
    next = ahead(
        forward_order(),
        forward_position_,
        units_[u].policy.forward_prefetch,
        Phase::forward);
  }
  for (UnitId v = 0; v < static_cast<UnitId>(units_.size()); ++v) {
    // Who waited for a module that did not run may have lent its weights to
    // others, whose backward reads them too.
    const bool waited_in_vain =
        std::exchange(state_[v].waits, false) && !state_[v].needs_backward;
    if (state_[v].awaited && !waited_in_vain) {
      continue;
    }
    if (!waited_in_vain &&
        std::find(next.begin(), next.end(), v) != next.end()) {
      state_[v].kept = state_[v].present;
    } else {
      release(v, out);  // was prefetched and did not run
    }
  }
  if (is_root(u)) {
    root_order_ = recorded_forward_;
  }
  if (is_root(u) || needs_backward) {
    backward_order_.assign(recorded_ends_.rbegin(), recorded_ends_.rend());
  }
}

void Scheduler::forward_end(const ScheduleEvent& event, Actions& out) {
  const UnitId u = event.unit;
  FLATSHARD_CHECK(
      !open_forwards_.empty() && open_forwards_.back() == u,
      usage,
      "unit {} ended a forward that is not the innermost open one; call "
      "reset() after a forward that was abandoned",
      units_[u].name);
  open_forwards_.pop_back();
  recorded_ends_.push_back(u);
  // What ran last begins the backward: keeping it saves a gather. A unit that
  // the order does not know may be anywhere.
  const std::vector<UnitId>& order = forward_order();
  const bool runs_last =
      forward_position_ >= order.size() &&
      std::find(order.begin(), order.end(), u) != order.end();
  const bool keep = event.needs_backward &&
                    (runs_last || !units_[u].policy.reshard_after_forward);
  state_[u].waits = event.more_follow;
  state_[u].needs_backward = event.needs_backward;
  if (!in_forward(u) && state_[u].backward_calls.empty() && !keep &&
      !event.more_follow) {
    release(u, out);
  }
  if (open_forwards_.empty()) {
    outer_forward_end(u, event.needs_backward, out);
  }
}

void Scheduler::recompute_begin(const ScheduleEvent& event, Actions& out) {
  // No prefetch: what runs next in a recompute is not what runs next in a
  // forward. This gather is the one that the unit's backward uses.
  ++state_[event.unit].open_recomputes;
  gather(event.unit, Phase::backward, out);
  await(event.unit, out);
}

void Scheduler::recompute_end(const ScheduleEvent& event) {
  int& open = state_[event.unit].open_recomputes;
  open = std::max(0, open - 1);
}

void Scheduler::task_begin(const ScheduleEvent& event) {
  path_ended_ = true;
  if (tasks_.empty()) {
    running_ = next_;
    backward_position_ = 0;
    recorded_backward_.clear();
  }
  if (!event.reduces) {
    unreduced_tasks_.insert(event.task);
  }
  Task& task = tasks_[event.task];
  for (const auto& [unit, count] : event.calls) {
    task.calls[unit] += count;
  }
  for (const auto& [unit, count] : event.expected) {
    task.grads[unit] += count;
  }
}

void Scheduler::backward_begin(const ScheduleEvent& event, Actions& out) {
  const UnitId u = event.unit;
  recorded_backward_.push_back(u);
  if (const auto task = tasks_.find(event.task); task != tasks_.end()) {
    count_down(task->second.calls, u);
  }
  UnitState& state = state_[u];
  // Its recompute is over, also when an early stop hid the end.
  state.open_recomputes = 0;
  state.kept = false;
  state.backward_calls.push_back(
      {event.call, event.task, !event.waits_for_inputs});
  backward_position_ = position_after(backward_order_, backward_position_, u);
  const UnitPolicy& policy = units_[u].policy;
  if (policy.unshard_in_backward) {
    gather(u, Phase::backward, out);
  }
  prefetch(
      ahead(
          backward_order_,
          backward_position_,
          policy.backward_prefetch,
          Phase::backward),
      Phase::backward,
      out);
  if (policy.unshard_in_backward) {
    await(u, out);
  }
  reduce_ready(u, out);
  if (!unreduced_tasks_.contains(event.task)) {
    queue_grads(u, out);
  }
}

void Scheduler::wgrad_done(const ScheduleEvent& event, Actions& out) {
  auto task = tasks_.find(event.task);
  FLATSHARD_CHECK(
      task != tasks_.end(),
      internal,
      "unit {} got a gradient in graph task {} that never began",
      units_[event.unit].name,
      event.task);
  count_down(task->second.grads, event.unit);
  queue_grads(event.unit, out);
  release_after_backward(event.unit, out);
}

void Scheduler::inputs_done(const ScheduleEvent& event, Actions& out) {
  for (BackwardCall& call : state_[event.unit].backward_calls) {
    if (call.call == event.call && call.task == event.task) {
      call.inputs_done = true;
    }
  }
  release_after_backward(event.unit, out);
}

void Scheduler::task_end(const ScheduleEvent& event, Actions& out) {
  tasks_.erase(event.task);
  unreduced_tasks_.erase(event.task);
  const auto num_units = static_cast<UnitId>(units_.size());
  if (!event.outermost) {
    for (UnitId u = 0; u < num_units; ++u) {
      bool began_here = false;
      for (BackwardCall& call : state_[u].backward_calls) {
        if (call.task == event.task) {
          call.inputs_done = true;
          began_here = true;
        }
      }
      if (began_here) {
        release_after_backward(u, out);
      }
    }
    return;
  }
  tasks_.clear();
  unreduced_tasks_.clear();
  if (running_.is_last && running_.sync) {
    for (const UnitId u : event.unfinished) {
      queue_grads(u, out);  // it did not run in this microbatch
    }
  }
  while (!grad_queue_.empty()) {
    reduce(grad_queue_.front(), out);
  }
  for (UnitId u = 0; u < num_units; ++u) {
    state_[u].backward_calls.clear();
    state_[u].open_recomputes = 0;
    if (!in_forward(u)) {
      end_backward(u, out);
    }
  }
  drain_down_to(0, out);
  out.push_back({ActionKind::join});
  if (!recorded_backward_.empty()) {
    backward_order_ = recorded_backward_;
  }
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
    if (units_[u].resident) {
      state_[u].present = false;  // gathered again into the same place
      state_[u].awaited = false;
    } else {
      release(u, out);
    }
  }
}

void Scheduler::unshard(const ScheduleEvent& event, Actions& out) {
  gather(event.unit, Phase::forward, out);
  if (event.awaits) {
    await(event.unit, out);
  }
  state_[event.unit].kept = state_[event.unit].present;
}

void Scheduler::reshard(const ScheduleEvent& event, Actions& out) {
  const UnitState& state = state_[event.unit];
  if (!in_forward(event.unit) && state.open_recomputes == 0 &&
      state.backward_calls.empty()) {
    release(event.unit, out);
  }
}

void Scheduler::reset(Actions& out) {
  open_forwards_.clear();
  outer_calls_.clear();
  path_ended_ = true;
  tasks_.clear();
  unreduced_tasks_.clear();
  grad_queue_.clear();
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    UnitState& state = state_[u];
    state.open_recomputes = 0;
    state.backward_calls.clear();
    if (state.in_grad_queue) {
      state.in_grad_queue = false;
      out.push_back({ActionKind::drain, u});
    }
    release(u, out);
  }
  drain_down_to(0, out);
  out.push_back({ActionKind::join});
}

void Scheduler::gather(UnitId unit, Phase phase, Actions& out) {
  UnitState& state = state_[unit];
  if (!gathers(unit) || state.present) {
    return;
  }
  state.present = true;
  state.awaited = false;
  out.push_back({ActionKind::gather, unit, phase});
}

void Scheduler::await(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  if (!gathers(unit) || state.awaited) {
    return;
  }
  state.awaited = true;
  out.push_back({ActionKind::await, unit});
}

void Scheduler::release(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  if (!state.present || units_[unit].resident) {
    return;
  }
  state.present = false;
  state.awaited = false;
  state.kept = false;
  state.waits = false;
  out.push_back({ActionKind::release, unit});
}

void Scheduler::release_after_backward(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  const bool inputs_done = std::all_of(
      state.backward_calls.begin(),
      state.backward_calls.end(),
      [](const BackwardCall& call) { return call.inputs_done; });
  if (!inputs_done || in_forward(unit) || state.open_recomputes > 0 ||
      is_pending(unit)) {
    return;
  }
  state.backward_calls.clear();
  end_backward(unit, out);
}

void Scheduler::end_backward(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  if (units_[unit].policy.reshard_after_backward) {
    release(unit, out);
  } else if (state.awaited) {
    state.kept = true;
  } else {
    release(unit, out);  // was prefetched and did not run
  }
}

std::vector<UnitId> Scheduler::ahead(
    const std::vector<UnitId>& order,
    std::size_t position,
    const std::optional<std::vector<UnitId>>& chosen,
    Phase phase) const {
  std::vector<UnitId> units;
  const auto wanted = [&](UnitId unit) {
    return gathers(unit) &&
           (phase == Phase::forward || units_[unit].policy.unshard_in_backward);
  };
  if (chosen) {
    std::copy_if(
        chosen->begin(),
        chosen->end(),
        std::back_inserter(units),
        wanted);
    return units;
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
    gather(unit, phase, out);
  }
}

void Scheduler::queue_grads(UnitId unit, Actions& out) {
  UnitState& state = state_[unit];
  if (units_[unit].grad_nbytes == 0 || state.in_grad_queue) {
    return;
  }
  if (!has_children_[unit]) {
    drain_down_to(options_.max_grad_slots - 1, out);
  }
  // The same unit again while its last reduction is under way: that slot has
  // to be free first.
  const auto again = std::find(reducing_.begin(), reducing_.end(), unit);
  if (again != reducing_.end()) {
    reducing_.erase(again);
    out.push_back({ActionKind::drain, unit});
  }
  state.in_grad_queue = true;
  grad_queue_.push_back(unit);
  out.push_back({ActionKind::acquire_grads, unit});
}

void Scheduler::reduce_ready(UnitId current, Actions& out) {
  // A unit with children ends after all of them: it waits for the outermost
  // end, on every rank alike, whichever of its parameters got gradients.
  std::vector<UnitId> ready;
  for (const UnitId v : grad_queue_) {
    if (v != current && !has_children_[v] && !is_pending(v)) {
      ready.push_back(v);
    }
  }
  for (const UnitId v : ready) {
    reduce(v, out);
  }
}

void Scheduler::reduce(UnitId unit, Actions& out) {
  grad_queue_.erase(std::find(grad_queue_.begin(), grad_queue_.end(), unit));
  state_[unit].in_grad_queue = false;
  const bool collective =
      running_.sync &&
      (units_[unit].reduce_every_microbatch || running_.is_last);
  out.push_back(
      {.kind = collective ? ActionKind::reduce : ActionKind::accumulate,
       .unit = unit,
       .is_last = running_.is_last});
  reducing_.push_back(unit);
}

void Scheduler::drain_down_to(std::size_t num_slots, Actions& out) {
  while (!reducing_.empty() &&
         (num_slots == 0 || num_leaf_grad_slots() > num_slots)) {
    out.push_back({ActionKind::drain, reducing_.front()});
    reducing_.pop_front();
  }
}

bool Scheduler::is_pending(UnitId unit) const {
  return std::any_of(tasks_.begin(), tasks_.end(), [unit](const auto& task) {
    return task.second.calls.contains(unit) || task.second.grads.contains(unit);
  });
}

std::size_t Scheduler::num_leaf_grad_slots() const {
  const auto is_leaf = [this](UnitId u) { return !has_children_[u]; };
  return std::count_if(grad_queue_.begin(), grad_queue_.end(), is_leaf) +
         std::count_if(reducing_.begin(), reducing_.end(), is_leaf);
}

bool Scheduler::resting() const {
  return restless_units().empty();
}

std::vector<std::string> Scheduler::restless_units() const {
  std::vector<std::string> names;
  for (UnitId u = 0; u < static_cast<UnitId>(units_.size()); ++u) {
    const UnitState& state = state_[u];
    const bool gathered = state.present && !state.kept && !units_[u].resident;
    if (gathered || in_forward(u) || !state.backward_calls.empty() ||
        state.in_grad_queue) {
      names.push_back(units_[u].name);
    }
  }
  return names;
}

bool Scheduler::in_forward(UnitId unit) const {
  return std::find(open_forwards_.begin(), open_forwards_.end(), unit) !=
         open_forwards_.end();
}

int Scheduler::num_gathered() const {
  return static_cast<int>(
      std::count_if(state_.begin(), state_.end(), [](const UnitState& s) {
        return s.present;
      }));
}

}  // namespace flatshard
