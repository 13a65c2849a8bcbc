#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <utility>

namespace flatshard {

void Scheduler::forward_begin(const ScheduleEvent& event, Actions& out) {
  const UnitId u = event.unit;
  if (open_forwards_.empty()) {
    outer_forward_begin(u);
  }
  record(recorded_forward_, u);
  open_forwards_.push_back(u);
  state_[u].holds.by_program = false;
  state_[u].holds.waits = false;
  state_[u].holds.ahead_of_forward = false;
  const std::vector<UnitId>& order = forward_order();
  forward_position_ = position_after(order, forward_position_, u);
  const PlaneSet planes = wanted(u, Phase::forward);
  gather(u, planes, Phase::forward, out);
  prefetch(
      ahead(
          order,
          forward_position_,
          units_[u].policy.forward_prefetch,
          Phase::forward),
      Phase::forward,
      out);
  await(u, planes, out);
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
  record(recorded_ends_, u);
  // The unit that runs last starts the backward, so keeping it saves an
  // all-gather. A unit outside the recorded order may be anywhere.
  const std::vector<UnitId>& order = forward_order();
  const bool runs_last =
      forward_position_ >= order.size() &&
      std::find(order.begin(), order.end(), u) != order.end();
  const bool keep = event.needs_backward &&
                    (runs_last || !units_[u].policy.reshard_after_forward);
  state_[u].holds.waits = event.more_follow;
  state_[u].holds.needs_backward = event.needs_backward;
  UnitState& state = state_[u];
  if (keep && !state.present.empty() && !units_[u].resident) {
    state.holds.kept_call = event.call;
  }
  const bool of_others =
      interleaved_ && (state.holds.ahead_of_backward || state.holds.kept_call);
  if (!in_forward(u) && state.backward_calls.empty() && !event.more_follow) {
    if (keep || of_others) {
      keep_for_backward(u, out);
    } else if (event.needs_backward && keeps_post_forward(u)) {
      save_post_forward(u, out);
      release(u, PlaneSet::all() - kept_planes(u) - state.saved, out);
    } else {
      release(u, PlaneSet::all() - kept_planes(u), out);
    }
  }
  download_kept(event, out);
  if (open_forwards_.empty()) {
    outer_forward_end(u, event.needs_backward, out);
  }
}

void Scheduler::record(std::vector<UnitId>& order, UnitId unit) {
  const bool is_repeated = !order.empty() && order.back() == unit;
  if (!is_repeated && !in_forward(unit)) {
    order.push_back(unit);
  }
}

void Scheduler::recompute_begin(const ScheduleEvent& event, Actions& out) {
  // No prefetch: the next unit in a recompute is not the next unit in a
  // forward. Planes that the unit's backward reads too are not all-gathered
  // once more.
  UnitState& state = state_[event.unit];
  ++state.open_recomputes;
  const UnitSpec& spec = units_[event.unit];
  const PlaneSet planes =
      in_pieces(event.unit, spec.reads(Phase::forward) - spec.on_request) |
      learned(event.unit, state.learned.in_recompute);
  gather(event.unit, planes, Phase::backward, out);
  await(event.unit, planes, out);
}

void Scheduler::recompute_end(const ScheduleEvent& event, Actions& out) {
  UnitState& state = state_[event.unit];
  state.open_recomputes = std::max(0, state.open_recomputes - 1);
  end_recompute(event.unit, {}, out);
}

void Scheduler::end_recompute(UnitId unit, PlaneSet still_read, Actions& out) {
  const UnitState& state = state_[unit];
  if (!in_forward(unit) && state.open_recomputes == 0 && !state.holds.waits) {
    release(
        unit,
        unread_in_backward(unit) - still_read - wanted_by_others(unit),
        out);
  }
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
  // If a path continues, the next call uses the prefetched units. A caller of a
  // single unit has no next call.
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
    // A unit that waited for a module that did not run may have lent its
    // weights to others, and their backward reads them too.
    state_[v].holds.ahead_of_forward = false;
    const bool waited_in_vain = std::exchange(state_[v].holds.waits, false) &&
                                !state_[v].holds.needs_backward;
    if (interleaved_ && state_[v].holds.ahead_of_backward) {
      continue;
    }
    const PlaneSet unused =
        waited_in_vain
            ? state_[v].present - kept_planes(v)
            : state_[v].present - state_[v].awaited - state_[v].saved;
    if (!waited_in_vain && !unused.empty() &&
        std::find(next.begin(), next.end(), v) != next.end()) {
      state_[v].holds.by_program = true;
    } else {
      release(v, unused, out);  // was prefetched and did not run
    }
  }
  if (is_root(u)) {
    root_order_ = recorded_forward_;
  }
  if (is_root(u) || needs_backward) {
    backward_order_.assign(recorded_ends_.rbegin(), recorded_ends_.rend());
  }
}

const std::vector<UnitId>& Scheduler::forward_order() const {
  const bool of_path = !is_root(outer_calls_.back()) && !path_order_.empty();
  return of_path ? path_order_ : root_order_;
}

}  // namespace flatshard
