#include "python/csrc/parameter_views.h"

#include "flatshard/core/error.h"
#include "python/csrc/shard_hooks.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace flatshard::python {

ParameterViews::ParameterViews(
    std::vector<UnitViews> units,
    py::object before_forward,
    py::object before_backward,
    py::object whole_written)
    : before_forward_(std::move(before_forward)),
      before_backward_(std::move(before_backward)),
      whole_written_(std::move(whole_written)) {
  for (UnitViews& views : units) {
    State state{.views = std::move(views)};
    for (const Place& place : state.views.places) {
      state.shards.push_back(place.shard.cast<at::Tensor>());
      state.wholes.push_back(place.whole.cast<at::Tensor>());
      const auto is_same = [&](const py::object& o) {
        return o.is(place.shown);
      };
      if (!place.shown.is_none() &&
          std::ranges::none_of(state.shown, is_same)) {
        state.shown.push_back(place.shown);
      }
    }
    units_.push_back(std::move(state));
  }
}

py::object ParameterViews::Place::face(bool whole_one) const {
  if (!whole_one) {
    return shard;
  }
  return shown.is_none() ? whole : shown.attr("tensor");
}

ParameterViews::~ParameterViews() {
  const py::gil_scoped_acquire gil;
  units_.clear();
  before_forward_ = {};
  before_backward_ = {};
  whole_written_ = {};
}

template <class F>
void ParameterViews::for_all_grads(F&& what) {
  for (const State& state : units_) {
    if (const auto grads = state.views.grads.lock()) {
      what(*grads);
    }
  }
}

void ParameterViews::set(State& state, bool whole) {
  if (state.shows_whole == whole) {
    return;
  }
  state.shows_whole = whole;
  if (whole) {
    state.versions.clear();
    for (const at::Tensor& tensor : state.wholes) {
      state.versions.push_back(tensor._version());
    }
  }
  for (const Place& place : state.views.places) {
    const py::object parameter = place.face(whole);
    if (PyDict_SetItem(
            place.parameters.ptr(),
            place.name.ptr(),
            parameter.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

void ParameterViews::unit_begins(UnitId unit) {
  State& state = units_.at(unit);
  ++state.open_forwards;
  end_kept(state);
  if (!state.shows_whole) {
    if (state.shows_others()) {
      before_forward_();  // reports them
    }
    for (const py::object& shown : state.shown) {
      shown.attr("renew")();
    }
  }
  set(state, true);
}

bool ParameterViews::in_forward() const {
  return std::ranges::any_of(units_, [](const State& s) {
    return s.open_forwards > 0;
  });
}

void ParameterViews::unit_ended(UnitId unit, After after) {
  State& state = units_.at(unit);
  // An early end of a recompute may have been dropped by a reset.
  state.open_forwards = std::max(0, state.open_forwards - 1);
  state.waits = after == After::more_follow;
  if (state.open_forwards == 0 && !state.in_backward && !state.waits) {
    end_kept(state);
    state.is_kept = after == After::may_be_kept && state.keeps &&
                    (state.points || state.is_resident);
    if (state.is_kept) {
      state.trained.clear();
      for (const at::Tensor& tensor : state.wholes) {
        state.trained.push_back(tensor.requires_grad());
      }
    }
    set(state, state.is_kept);
  }
  if (!in_forward()) {
    end_waits();
  }
}

void ParameterViews::tell_whole_writes(UnitId unit) {
  State& state = units_.at(unit);
  if (!state.shows_whole) {
    return;
  }
  std::vector<at::Tensor> written;
  for (std::size_t i = 0; i < state.wholes.size(); ++i) {
    const std::uint32_t now = state.wholes[i]._version();
    if (std::exchange(state.versions[i], now) != now) {
      written.push_back(state.wholes[i]);
    }
  }
  if (!written.empty()) {
    whole_written_(unit, written);
  }
}

void ParameterViews::end_all_kept() {
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].is_kept) {
      tell_whole_writes(static_cast<UnitId>(i));
      end_kept(units_[i]);
    }
  }
}

void ParameterViews::end_kept(State& state) {
  if (!std::exchange(state.is_kept, false)) {
    return;
  }
  for (std::size_t i = 0; i < state.wholes.size(); ++i) {
    const bool trains = state.wholes[i].requires_grad();
    if (trains != state.trained[i]) {
      state.shards[i].set_requires_grad(trains);
      state.wholes[i].set_requires_grad(state.trained[i]);
    }
  }
  state.shows_whole = false;
  for (const Place& place : state.views.places) {
    const auto shows = [&](const py::object& tensor) {
      return PyDict_GetItem(place.parameters.ptr(), place.name.ptr()) ==
             tensor.ptr();
    };
    // A tensor that somebody else put there stays, for shows_others.
    if (shows(place.face(true)) && PyDict_SetItem(
                                       place.parameters.ptr(),
                                       place.name.ptr(),
                                       place.shard.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

void ParameterViews::end_waits() {
  for (State& state : units_) {
    if (std::exchange(state.waits, false) && !state.in_backward) {
      set(state, false);
    }
  }
}

void ParameterViews::show(UnitId unit, bool whole) {
  State& state = units_.at(unit);
  if (state.open_forwards == 0 && !state.in_backward) {
    state.waits = false;
    end_kept(state);
    set(state, whole);
  }
}

void ParameterViews::capture(UnitId unit, bool captures) {
  captures_ = captures;
  set(units_.at(unit), captures);
}

bool ParameterViews::State::shows_others() const {
  return std::ranges::any_of(views.places, [&](const Place& place) {
    const py::object put = place.face(shows_whole);
    return PyDict_GetItem(place.parameters.ptr(), place.name.ptr()) !=
           put.ptr();
  });
}

bool ParameterViews::shows_others() const {
  return std::ranges::any_of(units_, &State::shows_others);
}

bool ParameterViews::trains_others() const {
  return !std::ranges::all_of(units_, [](const State& state) {
    return std::ranges::equal(
        state.shards,
        state.wholes,
        {},
        &at::Tensor::requires_grad,
        &at::Tensor::requires_grad);
  });
}

void ParameterViews::forward_begins() {
  const py::gil_scoped_acquire gil;
  before_forward_();
}

void ParameterViews::backward_begins() {
  const py::gil_scoped_acquire gil;
  before_backward_();
  if (!std::exchange(went_on_, false)) {
    for_all_grads([](GradViews& grads) { grads.begin_backward(); });
  }
}

// A checkpoint inside the unit calls its modules again.
void ParameterViews::backward_began(Unit& unit, CallId call) {
  const py::gil_scoped_acquire gil;
  State& state = units_.at(unit.id());
  state.in_backward = true;
  set(state, true);
}

void ParameterViews::backward_ended() {
  const py::gil_scoped_acquire gil;
  for (State& state : units_) {
    state.in_backward = false;
    state.ran_hooks = false;
    if (state.open_forwards == 0) {
      state.waits = false;
      end_kept(state);
      set(state, false);
    }
  }
  if (std::exchange(goes_on_, false)) {
    went_on_ = true;
    return;
  }
  runs_hooks_ = true;
  const auto done = c10::make_scope_exit([&] { runs_hooks_ = false; });
  const at::NoGradGuard no_grad;
  for_all_grads([](GradViews& grads) { grads.show(); });
}

void ParameterViews::check_may_go_on() const {
  for (const State& state : units_) {
    for (const at::Tensor& shard : state.shards) {
      FLATSHARD_CHECK(
          !has_post_hooks(shard),
          usage,
          "interleaved: expected no hooks of "
          "register_post_accumulate_grad_hook, or on gradient accumulators, of "
          "the model's parameters; a "
          "step whose backwards interleave has gradients only at its end");
    }
  }
}

bool ParameterViews::wants_reduced_gradients(const Unit& unit) {
  const auto& shards = units_.at(unit.id()).shards;
  return std::any_of(shards.begin(), shards.end(), has_post_hooks);
}

void ParameterViews::gradients_reduced(Unit& unit) {
  const py::gil_scoped_acquire gil;
  State& state = units_.at(unit.id());
  if (const auto grads = state.views.grads.lock()) {
    state.ran_hooks = true;
    runs_hooks_ = true;
    const auto done = c10::make_scope_exit([&] { runs_hooks_ = false; });
    grads->show_reduced();
  }
}

// Again in one backward: a unit in two reentrant checkpoints.
void ParameterViews::gradients_ready(Unit& unit, const SlotView&) {
  State& state = units_.at(unit.id());
  if (!state.ran_hooks) {
    return;
  }
  const py::gil_scoped_acquire gil;
  state.ran_hooks = false;
  if (const auto grads = state.views.grads.lock()) {
    grads->reclaim();
  }
}

void ParameterViews::parameters_pointed(Unit& unit, const SlotView&) {
  units_.at(unit.id()).points = true;
  call_shown(unit, "point");
}

void ParameterViews::parameters_cleared(Unit& unit) {
  State& state = units_.at(unit.id());
  state.points = false;
  if (state.is_kept && !state.in_backward) {
    const py::gil_scoped_acquire gil;
    end_kept(state);
    set(state, false);
  }
  call_shown(unit, "clear");
}

void ParameterViews::call_shown(Unit& unit, const char* function) {
  const State& state = units_.at(unit.id());
  if (state.shown.empty()) {
    return;
  }
  const py::gil_scoped_acquire gil;
  for (const py::object& shown : state.shown) {
    shown.attr(function)();
  }
}

void ParameterViews::check_no_hook() const {
  FLATSHARD_CHECK(
      !runs_hooks_,
      usage,
      "a hook of register_post_accumulate_grad_hook called the model whose "
      "backward runs, or unsharded or resharded its parameters; it may read "
      "and write its parameter and step an optimizer. Do the rest after "
      "backward()");
  FLATSHARD_CHECK(
      !captures_,
      usage,
      "the forward of a unit with cuda_graph=True called another unit, or "
      "unsharded or resharded parameters. A CUDA graph cannot do this; give "
      "the inner unit cuda_graph=True and leave it out here");
}

void ParameterViews::was_reset() {
  const py::gil_scoped_acquire gil;
  for (State& state : units_) {
    state.open_forwards = 0;
    state.in_backward = false;
    state.waits = false;
    state.points = false;
    end_kept(state);
    state.ran_hooks = false;
    set(state, false);
  }
  goes_on_ = went_on_ = false;
  for_all_grads([](GradViews& grads) { grads.drop(); });
}

}  // namespace flatshard::python
