#include "flatshard/schedule/scheduler.h"

#include "flatshard/core/error.h"

namespace flatshard {

void Scheduler::gather(
    UnitId unit,
    PlaneSet slices,
    Phase phase,
    Actions& out) {
  const UnitSpec& spec = units_[unit];
  UnitState& state = state_[unit];
  const auto act = [&](ActionKind kind, PlaneId slice) {
    const auto [plane, part] = spec.plane_part(slice);
    out.push_back(
        {.kind = kind,
         .unit = unit,
         .plane = plane,
         .phase = phase,
         .part = part,
         .from_post_forward = kind == ActionKind::gather && slice == 0 &&
                              spec.post_forward != kNoPlane &&
                              state.present.contains(spec.post_forward)});
  };
  (slices - state.present).for_each([&](PlaneId slice) {
    state.present.insert(slice);
    const PlaneId source = spec.source(slice);
    if (source == kStored) {
      act(ActionKind::gather, slice);
      return;
    }
    // Other readers of the source have it already, since it has a lower number.
    const bool staged = !state.present.contains(source);
    if (staged) {
      act(ActionKind::gather, source);
    }
    act(ActionKind::derive, slice);
    if (staged && !spec.resident) {
      out.push_back(
          {.kind = ActionKind::release,
           .unit = unit,
           .plane = spec.plane_part(source).plane,
           .part = spec.plane_part(source).part});
    }
  });
}

void Scheduler::await(UnitId unit, PlaneSet slices, Actions& out) {
  const UnitSpec& spec = units_[unit];
  PlaneSet asked = spec.on_request;
  spec.on_request.for_each(
      [&](PlaneId plane) { asked = asked | spec.parts(plane); });
  await_slices(unit, slices - asked, out);
}

void Scheduler::await_slices(UnitId unit, PlaneSet slices, Actions& out) {
  UnitState& state = state_[unit];
  (slices - state.awaited).for_each([&](PlaneId slice) {
    state.awaited.insert(slice);
    const auto [plane, part] = units_[unit].plane_part(slice);
    out.push_back(
        {.kind = ActionKind::await,
         .unit = unit,
         .plane = plane,
         .part = part});
  });
  // Compute has waited for the all-gather, so it may reuse the slice's memory.
  if (const PlaneId slice = units_[unit].post_forward;
      slice != kNoPlane && state.awaited.contains(0)) {
    release(unit, {slice}, out);
  }
}

void Scheduler::release(UnitId unit, PlaneSet slices, Actions& out) {
  UnitState& state = state_[unit];
  const PlaneSet resting = units_[unit].resting();
  const PlaneSet released = (slices & state.present) - resting;
  if (released.empty()) {
    return;
  }
  state.present = state.present - released;
  state.awaited = state.awaited - released;
  state.saved = state.saved - released;
  released.for_each([&](PlaneId slice) {
    const auto [plane, part] = units_[unit].plane_part(slice);
    out.push_back(
        {.kind = ActionKind::release,
         .unit = unit,
         .plane = plane,
         .part = part});
  });
  if ((state.present - resting).empty()) {
    state.holds = {};
  }
}

void Scheduler::read(const ScheduleEvent& event, Actions& out) {
  const UnitSpec& spec = units_[event.unit];
  UnitState& state = state_[event.unit];
  const bool in_backward = !tasks_.empty() && !in_forward(event.unit);
  const PlaneId part = spec.num_parts(event.plane) > 0
                           ? spec.slice(event.plane, event.part)
                           : event.plane;
  const bool by_part =
      spec.gather_parts == GatherParts::module ||
      (spec.gather_parts == GatherParts::recomputed && in_backward);
  const PlaneId slice =
      by_part && !state.present.contains(event.plane) ? part : event.plane;
  const Phase phase = in_backward ? Phase::backward : Phase::forward;
  gather(event.unit, {slice}, phase, out);
  await_slices(event.unit, {slice}, out);
  if (in_backward && !spec.reads(Phase::backward).contains(event.plane)) {
    state.open_recomputes > 0 ? state.asked.in_recompute.insert(part)
                              : state.asked.in_backward.insert(part);
  }
}

PlaneSet Scheduler::in_pieces(UnitId unit, PlaneSet planes) const {
  const UnitSpec& spec = units_[unit];
  if (spec.gather_parts != GatherParts::module) {
    return planes;
  }
  PlaneSet pieces;
  planes.for_each([&](PlaneId plane) {
    pieces = pieces |
             (spec.num_parts(plane) > 0 ? spec.parts(plane) : PlaneSet{plane});
  });
  return pieces;
}

PlaneSet Scheduler::wanted(UnitId unit, Phase phase) const {
  return in_pieces(unit, units_[unit].reads(phase));
}

PlaneSet Scheduler::learned(UnitId unit, PlaneSet asked) const {
  const UnitSpec& spec = units_[unit];
  if (asked.empty() || spec.gather_parts == GatherParts::module) {
    return asked;
  }
  // Planes that are read as one piece are all-gathered as one piece. So are
  // sources of planes that the backward derives.
  PlaneSet sources;
  spec.reads(Phase::backward).for_each([&](PlaneId plane) {
    if (const PlaneId source = spec.source(plane); source != kStored) {
      sources.insert(source);
    }
  });
  PlaneSet pieces;
  spec.planes().for_each([&](PlaneId plane) {
    const PlaneSet parts = spec.parts(plane);
    const PlaneSet of_plane = asked & (parts | PlaneSet{plane});
    if (of_plane.empty()) {
      return;
    }
    if (spec.gather_parts == GatherParts::unit || of_plane == parts ||
        sources.contains(plane)) {
      pieces.insert(plane);
    } else {
      pieces = pieces | of_plane;
    }
  });
  return pieces;
}

PlaneSet Scheduler::kept_planes(UnitId unit) const {
  if (state_[unit].read_by_graph) {
    return state_[unit].awaited;
  }
  const UnitSpec& spec = units_[unit];
  PlaneSet slices;
  if (spec.policy.keep_backward_planes) {
    (spec.reads(Phase::backward) - spec.forward_reads)
        .for_each([&](PlaneId plane) {
          slices = slices | spec.parts(plane) | PlaneSet{plane};
        });
  }
  return slices & state_[unit].awaited;
}

PlaneSet Scheduler::unread_in_backward(UnitId unit) const {
  const UnitSpec& spec = units_[unit];
  if (!spec.policy.reshard_after_forward &&
      !spec.policy.reshard_after_backward) {
    return {};  // the next forward reads them
  }
  const PlaneSet unread = spec.planes() - spec.backward_reads;
  PlaneSet slices = unread;
  unread.for_each([&](PlaneId plane) { slices = slices | spec.parts(plane); });
  return slices;
}

bool Scheduler::keeps_post_forward(UnitId unit) const {
  const UnitSpec& spec = units_[unit];
  return spec.post_forward != kNoPlane && spec.policy.keep_post_forward &&
         spec.policy.unshard_in_backward;
}

void Scheduler::save_post_forward(UnitId unit, Actions& out) {
  const PlaneId slice = units_[unit].post_forward;
  UnitState& state = state_[unit];
  if (state.awaited.contains(0) && !kept_planes(unit).contains(0)) {
    state.present.insert(slice);
    state.saved.insert(slice);
    out.push_back({.kind = ActionKind::derive, .unit = unit, .plane = slice});
  }
}

void Scheduler::keep_for_backward(UnitId unit, Actions& out) {
  const UnitSpec& spec = units_[unit];
  UnitState& state = state_[unit];
  if (spec.policy.unshard_in_backward) {
    PlaneSet derived;
    wanted(unit, Phase::backward).for_each([&](PlaneId slice) {
      const PlaneId source = spec.source(slice);
      if (source != kStored && state.present.contains(source)) {
        derived.insert(slice);
      }
    });
    gather(unit, derived, Phase::forward, out);
    state.saved = state.saved | derived;
  }
  const PlaneSet also =
      learned(unit, state.learned.in_recompute | state.learned.in_backward);
  release(unit, unread_in_backward(unit) - also, out);
}

}  // namespace flatshard
