// The part of AutogradEvents that handles backwards.
#include "flatshard/autograd/autograd_events.h"
#include "flatshard/autograd/autograd_task.h"
#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// The reduction of its backward has counted it as zero.
[[noreturn]] void refuse_late_grad(const Unit& unit, const UnitParameter& p) {
  FLATSHARD_THROW(
      usage,
      "parameter {} of unit {} got its gradient outside a backward: the unit "
      "was reduced without it when its backward ended. Compute weight "
      "gradients inside the backward, or delay them in a BackwardPass. To set "
      "a gradient, assign `.grad` of the sharded parameter before the forward",
      p.name,
      unit.name());
}

}  // namespace

std::vector<std::shared_ptr<UnitCall>> AutogradEvents::calls_of_task(
    const WatchedTensor* first) {
  std::erase_if(calls_, [](const auto& call) { return call.expired(); });
  const auto is_first = [&](const UnitCall& call) {
    return first != nullptr && std::any_of(
                                   first->uses.begin(),
                                   first->uses.end(),
                                   [&](const WatchedTensor::Use& use) {
                                     return use.call.get() == &call &&
                                            use.is_output;
                                   });
  };
  std::vector<std::shared_ptr<UnitCall>> calls;  // by their ends, as in calls_
  calls.reserve(calls_.size());
  for (const auto& weak : calls_) {
    const auto call = weak.lock();
    if (is_first(*call) || std::any_of(
                               call->output_nodes.begin(),
                               call->output_nodes.end(),
                               [](const auto& weak_node) {
                                 const auto node = weak_node.lock();
                                 return node &&
                                        autograd_task::expects(node.get());
                               })) {
      calls.push_back(call);
    }
  }
  return calls;
}

TaskId AutogradEvents::enter_task(
    const UnitParameter* arrived,
    const WatchedTensor* first) {
  if (pass_) {
    return *pass_;
  }
  const TaskId task = autograd_task::current_id();
  if (tasks_.contains(task)) {
    return task;
  }
  listener_.task_begins();
  ScheduleEvent begin{.kind = EventKind::task_begin, .task = task};
  for (const auto& unit : units_) {
    int count = 0;
    const auto& accumulators = accumulators_[unit->id()];
    for (std::size_t i = 0; i < accumulators.size(); ++i) {
      const NodePtr& node = accumulators[i].node;
      count += node && autograd_task::expects(node.get());
      const UnitParameter& p = unit->parameters()[i];
      if (tasks_.empty() && &p != arrived && p.tensor.grad().defined()) {
        refuse_late_grad(*unit, p);
      }
    }
    if (count > 0) {
      begin.expected.emplace_back(unit->id(), count);
    }
  }
  BackwardTask& opened = tasks_[task];
  opened.to_begin = calls_of_task(first);
  std::map<UnitId, int> num_calls;
  for (const auto& call : opened.to_begin) {
    ++num_calls[call->unit];
  }
  begin.calls.assign(num_calls.begin(), num_calls.end());
  begin.reduces =
      !begin.expected.empty() || !autograd_task::has_chosen_inputs();
  opened.alive = autograd_task::at_end([hooks = hooks_, task] {
    if (const auto self = hooks.lock()) {
      self->on_task_end(task);
    }
  });
  listener_.feed(begin);
  return task;
}

void AutogradEvents::tensor_grad(const WatchedTensor& tensor) {
  const TaskId task = enter_task(nullptr, &tensor);
  for (auto use = tensor.uses.rbegin(); use != tensor.uses.rend(); ++use) {
    if (use->is_output) {
      begin_backward_up_to(use->call, task);
    } else {
      input_grad_arrived(use->call, task);
    }
  }
}

void AutogradEvents::begin_backward_up_to(
    const std::shared_ptr<UnitCall>& call,
    TaskId task) {
  auto& to_begin = tasks_.at(task).to_begin;
  while (!to_begin.empty() && to_begin.back()->end >= call->end) {
    const auto next = std::move(to_begin.back());
    to_begin.pop_back();
    begin_backward(*next, task);
  }
  begin_backward(*call, task);
}

void AutogradEvents::begin_backward(UnitCall& call, TaskId task) {
  if (call.inputs_left.contains(task)) {
    return;  // another output was first
  }
  const Unit& unit = *units_[call.unit];
  FLATSHARD_CHECK(
      call.generation == unit.weights().generation(),
      usage,
      "the weights of unit {} changed between its forward and its backward; "
      "step the optimizer only when no backward is to come",
      unit.name());
  call.inputs_left[task] = call.num_watched_inputs;
  listener_.backward_begins(call.unit, call.id);
  listener_.feed(
      {.kind = EventKind::backward_begin,
       .unit = call.unit,
       .call = call.id,
       .task = task,
       .makes_graph = at::GradMode::is_enabled(),
       // Without an input to watch the unit stays unsharded until the task
       // ends. After its last gradient its weights may still be read, by a
       // child that uses frozen ones or by a recompute inside its forward.
       .waits_for_inputs = true});
}

void AutogradEvents::input_grad_arrived(
    const std::shared_ptr<UnitCall>& call,
    TaskId task) {
  const auto left = call->inputs_left.find(task);
  if (left == call->inputs_left.end() || left->second == 0) {
    return;
  }
  if (--left->second == 0 && !call->has_unwatched_input) {
    listener_.feed(
        {.kind = EventKind::inputs_done,
         .unit = call->unit,
         .call = call->id,
         .task = task});
  }
}

const ParameterRef* AutogradEvents::wgrad_begins(const at::Tensor& parameter) {
  const ParameterRef* const ref = find(parameter);
  if (ref == nullptr) {
    return nullptr;
  }
  const NodePtr& accumulator = accumulators_[ref->unit][ref->index].node;
  if (!accumulator) {
    return nullptr;
  }
  if (!in_backward()) {
    refuse_late_grad(*units_[ref->unit], this->parameter(*ref));
  }
  enter_task();
  // `backward(inputs=...)` and `grad()` may leave this parameter out.
  return autograd_task::expects(accumulator.get()) ? ref : nullptr;
}

void AutogradEvents::parameter_done(ParameterRef ref) {
  UnitParameter& p = parameter(ref);
  const TaskId task = enter_task(&p);
  const at::Tensor grad = std::exchange(p.tensor.mutable_grad(), {});
  if (grad.defined()) {
    units_[ref.unit]->gradients().add(ref.index, grad);
  }
  const auto late = put_off_.find({ref.unit, ref.index});
  if (late == put_off_.end()) {
    listener_.feed(
        {.kind = EventKind::wgrad_done, .unit = ref.unit, .task = task});
    return;
  }
  const int count = late->second;
  put_off_.erase(late);
  listener_.feed(
      {.kind = EventKind::wgrad_deferred,
       .unit = ref.unit,
       .task = task,
       .count = count});
}

bool AutogradEvents::task_end(TaskId task) {
  if (tasks_.erase(task) == 0) {
    return false;  // dropped by a reset
  }
  if (pass_ == task) {
    pass_.reset();
  }
  ScheduleEvent end{
      .kind = EventKind::task_end,
      .task = task,
      .outermost = tasks_.empty()};
  for (const auto& unit : units_) {
    if (unit->gradients().has_unreduced()) {
      end.unfinished.push_back(unit->id());
    }
  }
  listener_.feed(end);
  if (end.outermost) {
    forget_dead_tensors();
  }
  return end.outermost;
}

}  // namespace flatshard
