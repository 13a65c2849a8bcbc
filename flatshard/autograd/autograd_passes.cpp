// Passes: the caller reports the starts and ends of units, in place of hooks.
#include "flatshard/autograd/autograd_events.h"
#include "flatshard/core/error.h"

#include <algorithm>
#include <map>
#include <utility>

namespace flatshard {

std::shared_ptr<UnitCall> AutogradEvents::Passes::begin_call(UnitId unit) {
  auto call = std::make_shared<UnitCall>();
  call->unit = unit;
  call->id = events_.next_call_++;
  events_.listener_.forward_begins(unit, /*outermost=*/!events_.in_forward());
  call->generation = events_.units_[unit]->weights().generation();
  events_.open_calls_.push_back(call);
  events_.listener_.feed(
      {.kind = EventKind::forward_begin, .unit = unit, .call = call->id});
  return call;
}

void AutogradEvents::Passes::end_call(UnitCall& call, bool more_follow) {
  auto& open = events_.open_calls_;
  const auto found = std::ranges::find(open, &call, [](const auto& other) {
    return other.get();
  });
  // Another microbatch's forward of the unit may have started since.
  const bool is_innermost =
      found != open.end() && std::all_of(found, open.end(), [&](auto& other) {
        return other->unit == call.unit;
      });
  FLATSHARD_CHECK(
      is_innermost,
      usage,
      "expected the forward of unit {} to be the one that started last",
      events_.units_[call.unit]->name());
  open.erase(found);
  call.end = events_.next_end_++;
  events_.listener_.feed(
      {.kind = EventKind::forward_end,
       .unit = call.unit,
       .call = call.id,
       .needs_backward = true,
       .more_follow = more_follow});
}

TaskId AutogradEvents::Passes::open(
    const std::vector<UnitId>& units,
    bool interleaved,
    std::weak_ptr<void> alive) {
  events_.listener_.task_begins();
  // The engine's ids are not negative, and -1 is none.
  events_.pass_ = --events_.last_pass_;
  events_.tasks_[*events_.pass_].alive = std::move(alive);
  ScheduleEvent begin{
      .kind = EventKind::task_begin,
      .task = *events_.pass_,
      .interleaved = interleaved};
  for (const UnitId unit : units) {
    begin.calls.emplace_back(unit, 1);
  }
  events_.listener_.feed(begin);
  return *events_.pass_;
}

void AutogradEvents::Passes::begin_backward(UnitCall& call) {
  check_open(call);
  events_.begin_backward(call, *events_.pass_);
}

void AutogradEvents::Passes::event(EventKind kind, const UnitCall& call) {
  check_open(call);
  events_.listener_.feed(
      {.kind = kind,
       .unit = call.unit,
       .call = call.id,
       .task = *events_.pass_});
}

void AutogradEvents::Passes::check_open(const UnitCall& call) const {
  FLATSHARD_CHECK(
      events_.pass_.has_value(),
      usage,
      "unit {}: expected open_backward before its backward",
      events_.units_[call.unit]->name());
}

void AutogradEvents::Passes::put_off(ParameterRef parameter) {
  ++events_.put_off_[{parameter.unit, parameter.index}];
}

void AutogradEvents::Passes::late_wgrad_done(ParameterRef parameter) {
  events_.listener_.feed(
      {.kind = EventKind::wgrad_done,
       .unit = parameter.unit,
       .task = *events_.pass_,
       .deferred = true});
}

void AutogradEvents::Passes::give_up() {
  events_.open_calls_.clear();
  events_.put_off_.clear();
  events_.pass_.reset();
}

}  // namespace flatshard
