#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

void count_down(std::map<UnitId, int>& counts, UnitId unit) {
  const auto found = counts.find(unit);
  if (found != counts.end() && --found->second == 0) {
    counts.erase(found);
  }
}

}  // namespace

void Scheduler::task_begin(const ScheduleEvent& event) {
  path_ended_ = true;
  if (tasks_.empty()) {
    running_ = next_;
    interleaved_ = event.interleaved;
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
  // Its recompute has ended, even if an early stop hid the end.
  state.open_recomputes = 0;
  state.holds.by_program = false;
  state.read_by_graph |= event.makes_graph;
  state.holds.ahead_of_backward = false;
  if (state.holds.kept_call == event.call) {
    state.holds.kept_call.reset();
  }
  state.backward_calls.push_back(
      {event.call, event.task, !event.waits_for_inputs});
  backward_position_ = position_after(backward_order_, backward_position_, u);
  const UnitPolicy& policy = units_[u].policy;
  const PlaneSet also = learned(u, state.learned.in_backward);
  const PlaneSet planes = policy.unshard_in_backward
                              ? wanted(u, Phase::backward) | also
                              : PlaneSet();
  gather(u, planes, Phase::backward, out);
  prefetch(
      ahead(
          backward_order_,
          backward_position_,
          policy.backward_prefetch,
          Phase::backward),
      Phase::backward,
      out);
  load_for_backward(event.call, out);
  await(u, planes, out);
  end_recompute(u, also, out);
  reduce_ready(u, out);
  if (!unreduced_tasks_.contains(event.task)) {
    queue_grads(u, out);
  }
}

void Scheduler::wgrad_done(const ScheduleEvent& event, Actions& out) {
  Task& task = task_of_gradient(event);
  count_down(event.deferred ? task.deferred : task.grads, event.unit);
  queue_grads(event.unit, out);
  reduce_due(out);
  release_after_backward(event.unit, out);
}

void Scheduler::wgrad_deferred(const ScheduleEvent& event, Actions& out) {
  Task& task = task_of_gradient(event);
  for (int i = 0; i < event.count; ++i) {
    count_down(task.grads, event.unit);
  }
  task.deferred[event.unit] += event.count;
  queue_grads(event.unit, out);
  release_after_backward(event.unit, out);
}

Scheduler::Task& Scheduler::task_of_gradient(const ScheduleEvent& event) {
  const auto task = tasks_.find(event.task);
  FLATSHARD_CHECK(
      task != tasks_.end(),
      internal,
      "unit {} got a gradient in graph task {} that never started",
      units_[event.unit].name,
      event.task);
  return task->second;
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
  if (const auto task = tasks_.find(event.task); task != tasks_.end()) {
    for (const auto& [unit, count] : task->second.deferred) {
      FLATSHARD_THROW(
          usage,
          "unit {}: {} delayed weight gradients were not computed before "
          "their backward ended",
          units_[unit].name,
          count);
    }
  }
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
    reduce_due(out);  // more gradients do not come
    return;
  }
  tasks_.clear();
  unreduced_tasks_.clear();
  for (const UnitId u : event.unfinished) {
    if (syncs(u) && is_last(u)) {
      queue_grads(u, out);  // it did not run in this microbatch
    }
  }
  // The backward of another microbatch follows.
  const bool goes_on = interleaved_ && !running_.is_last;
  for (UnitId u = 0; u < num_units; ++u) {
    state_[u].backward_calls.clear();
    state_[u].open_recomputes = 0;
    state_[u].holds.ahead_of_backward = false;
    state_[u].learned = std::exchange(state_[u].asked, {});
    if (!goes_on) {
      state_[u].holds.kept_call.reset();
    }
    if (!in_forward(u)) {
      end_backward(u, out);
    }
  }
  // After the units are resharded: a root's weights and its gradients, in the
  // slot and reduced, need not exist at once.
  while (!grad_queue_.empty()) {
    reduce(due_.empty() ? grad_queue_.front() : due_.front(), out);
  }
  interleaved_ = false;
  if (!goes_on) {
    drain_down_to(0, out);
    out.push_back({ActionKind::join});
  }
  if (!recorded_backward_.empty()) {
    backward_order_ = recorded_backward_;
  }
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
    release(
        unit,
        PlaneSet::all() - wanted_by_others(unit) - kept_planes(unit),
        out);
    return;
  }
  release(  // prefetched in vain
      unit,
      state.present - state.awaited - wanted_by_others(unit),
      out);
  state.holds.by_program = state.holds.by_program || !state.awaited.empty();
}

PlaneSet Scheduler::wanted_by_others(UnitId unit) const {
  const UnitState& state = state_[unit];
  PlaneSet slices;
  if (!interleaved_) {
    return slices;
  }
  if (state.holds.ahead_of_forward) {
    slices = wanted(unit, Phase::forward);
  }
  if (state.holds.kept_call) {
    slices =
        slices | wanted(unit, Phase::backward) |
        learned(unit, state.learned.in_recompute | state.learned.in_backward);
  }
  return slices;
}

void Scheduler::queue_grads(UnitId unit, Actions& out) {
  if (units_[unit].grad_nbytes == 0 || fills_grads(unit)) {
    return;
  }
  if (!has_children_[unit]) {
    drain_down_to(options_.max_grad_slots - 1, out);
  }
  // The same unit again while its last reduction is in flight: that slot has to
  // be free first.
  const auto again = std::find(reducing_.begin(), reducing_.end(), unit);
  if (again != reducing_.end()) {
    reducing_.erase(again);
    out.push_back({ActionKind::drain, unit});
  }
  grad_queue_.push_back(unit);
  out.push_back({ActionKind::acquire_grads, unit});
}

void Scheduler::reduce_ready(UnitId current, Actions& out) {
  // A unit with children ends after all of them: it waits for the outermost
  // end, on every rank alike, no matter which of its parameters got gradients.
  for (const UnitId v : grad_queue_) {
    const bool is_due = std::ranges::find(due_, v) != due_.end();
    if (v != current && !has_children_[v] && !awaits_deferred(v) && !is_due &&
        has_begun(v)) {
      due_.push_back(v);
    }
  }
  reduce_due(out);
}

// The gradients that a rank waits for depend on the parameters that it uses. So
// it does not reduce a complete unit before a unit that became due earlier: on
// a rank that uses all parameters, that one may be complete first.
void Scheduler::reduce_due(Actions& out) {
  while (!due_.empty() && !is_pending(due_.front()) &&
         !awaits_deferred(due_.front())) {
    reduce(due_.front(), out);
  }
}

void Scheduler::reduce(UnitId unit, Actions& out) {
  grad_queue_.erase(std::find(grad_queue_.begin(), grad_queue_.end(), unit));
  std::erase(due_, unit);
  out.push_back(next_reduction(unit));
  reducing_.push_back(unit);
}

Action Scheduler::next_reduction(UnitId unit) const {
  const bool collective =
      syncs(unit) && (units_[unit].reduce_every_microbatch || is_last(unit));
  return {
      .kind = collective ? ActionKind::reduce : ActionKind::accumulate,
      .unit = unit,
      .is_last = is_last(unit)};
}

bool Scheduler::syncs(UnitId unit) const {
  return running_.sync && units_[unit].policy.sync_gradients;
}

bool Scheduler::is_last(UnitId unit) const {
  return running_.is_last && units_[unit].policy.all_reduce;
}

void Scheduler::drain_down_to(std::size_t num_slots, Actions& out) {
  while (!reducing_.empty() &&
         (num_slots == 0 || num_leaf_grad_slots() > num_slots)) {
    out.push_back({ActionKind::drain, reducing_.front()});
    reducing_.pop_front();
  }
}

bool Scheduler::fills_grads(UnitId unit) const {
  return std::ranges::find(grad_queue_, unit) != grad_queue_.end();
}

bool Scheduler::is_pending(UnitId unit) const {
  return std::any_of(tasks_.begin(), tasks_.end(), [unit](const auto& task) {
    return task.second.calls.contains(unit) || task.second.grads.contains(unit);
  });
}

bool Scheduler::has_begun(UnitId unit) const {
  return std::none_of(tasks_.begin(), tasks_.end(), [unit](const auto& task) {
    return task.second.calls.contains(unit);
  });
}

bool Scheduler::awaits_deferred(UnitId unit) const {
  return std::any_of(tasks_.begin(), tasks_.end(), [unit](const auto& task) {
    return task.second.deferred.contains(unit);
  });
}

std::size_t Scheduler::num_leaf_grad_slots() const {
  const auto is_leaf = [this](UnitId u) { return !has_children_[u]; };
  return std::count_if(grad_queue_.begin(), grad_queue_.end(), is_leaf) +
         std::count_if(reducing_.begin(), reducing_.end(), is_leaf);
}

}  // namespace flatshard
