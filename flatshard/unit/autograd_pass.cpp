// Passes: units whose begins and ends the caller says itself.
#include "flatshard/core/error.h"
#include "flatshard/unit/autograd_events.h"

#include <map>
#include <utility>

namespace flatshard {

std::shared_ptr<UnitCall> AutogradEvents::begin_call(UnitId unit) {
  auto call = std::make_shared<UnitCall>();
  call->unit = unit;
  call->id = next_call_++;
  listener_.forward_begins(unit, /*outermost=*/!in_forward());
  call->generation = units_[unit]->generation();
  open_calls_.push_back(call);
  listener_.feed(
      {.kind = EventKind::forward_begin, .unit = unit, .call = call->id});
  return call;
}

void AutogradEvents::end_call(UnitCall& call) {
  FLATSHARD_CHECK(
      !open_calls_.empty() && open_calls_.back().get() == &call,
      usage,
      "expected the forward of unit {} to be the one that began last",
      units_[call.unit]->name());
  open_calls_.pop_back();
  call.end = next_end_++;
  listener_.feed(
      {.kind = EventKind::forward_end,
       .unit = call.unit,
       .call = call.id,
       .needs_backward = true});
}

TaskId AutogradEvents::open_pass(
    const std::vector<UnitId>& units,
    bool interleaved,
    std::weak_ptr<void> alive) {
  listener_.task_begins();
  // The engine's ids are not negative, and -1 is none.
  pass_ = --last_pass_;
  tasks_[*pass_].alive = std::move(alive);
  ScheduleEvent begin{
      .kind = EventKind::task_begin,
      .task = *pass_,
      .interleaved = interleaved};
  for (const UnitId unit : units) {
    begin.calls.emplace_back(unit, 1);
  }
  listener_.feed(begin);
  return *pass_;
}

void AutogradEvents::begin_pass_backward(UnitCall& call) {
  check_pass(call);
  begin_backward(call, *pass_);
}

void AutogradEvents::pass_event(EventKind kind, const UnitCall& call) {
  check_pass(call);
  listener_.feed(
      {.kind = kind, .unit = call.unit, .call = call.id, .task = *pass_});
}

void AutogradEvents::check_pass(const UnitCall& call) const {
  FLATSHARD_CHECK(
      pass_.has_value(),
      usage,
      "unit {}: expected open_backward before its backward",
      units_[call.unit]->name());
}

void AutogradEvents::put_off(ParameterRef parameter) {
  ++put_off_[{parameter.unit, parameter.index}];
}

void AutogradEvents::late_wgrad_done(ParameterRef parameter) {
  listener_.feed(
      {.kind = EventKind::wgrad_done,
       .unit = parameter.unit,
       .task = *pass_,
       .deferred = true});
}

void AutogradEvents::give_up_passes() {
  open_calls_.clear();
  put_off_.clear();
  pass_.reset();
}

}  // namespace flatshard
