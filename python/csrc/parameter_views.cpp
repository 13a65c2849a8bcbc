#include "python/csrc/parameter_views.h"

#include <algorithm>

namespace flatshard::python {

ParameterViews::ParameterViews(
    std::vector<std::vector<Place>> places_of_units,
    py::object before_backward,
    py::object after_backward,
    py::object after_reset)
    : before_backward_(std::move(before_backward)),
      after_backward_(std::move(after_backward)),
      after_reset_(std::move(after_reset)) {
  for (auto& places : places_of_units) {
    units_.push_back({.places = std::move(places)});
  }
}

ParameterViews::~ParameterViews() {
  const py::gil_scoped_acquire gil;
  units_.clear();
  before_backward_ = {};
  after_backward_ = {};
  after_reset_ = {};
}

void ParameterViews::set(State& state, bool whole) {
  if (state.shows_whole == whole) {
    return;
  }
  state.shows_whole = whole;
  for (const Place& place : state.places) {
    const py::object& parameter = whole ? place.whole : place.shard;
    if (PyDict_SetItem(
            place.parameters.ptr(),
            place.name.ptr(),
            parameter.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

void ParameterViews::forward_begins(UnitId unit) {
  State& state = units_.at(unit);
  ++state.open_forwards;
  set(state, true);
}

void ParameterViews::forward_ended(UnitId unit) {
  State& state = units_.at(unit);
  // An early end of a recompute may have been dropped by a reset.
  state.open_forwards = std::max(0, state.open_forwards - 1);
  if (state.open_forwards == 0 && !state.in_backward) {
    set(state, false);
  }
}

void ParameterViews::show(UnitId unit, bool whole) {
  State& state = units_.at(unit);
  if (state.open_forwards == 0 && !state.in_backward) {
    set(state, whole);
  }
}

void ParameterViews::backward_begins() {
  const py::gil_scoped_acquire gil;
  before_backward_();
}

// A checkpoint inside the unit calls its modules again.
void ParameterViews::backward_began(Unit& unit) {
  const py::gil_scoped_acquire gil;
  State& state = units_.at(unit.id());
  state.in_backward = true;
  set(state, true);
}

void ParameterViews::backward_ended() {
  const py::gil_scoped_acquire gil;
  for (State& state : units_) {
    state.in_backward = false;
    if (state.open_forwards == 0) {
      set(state, false);
    }
  }
  after_backward_();
}

void ParameterViews::was_reset() {
  const py::gil_scoped_acquire gil;
  for (State& state : units_) {
    state.open_forwards = 0;
    state.in_backward = false;
    set(state, false);
  }
  after_reset_();
}

}  // namespace flatshard::python
