// The autograd side of the Runtime: hooks on modules, tensors and gradient
// accumulators become events for the Scheduler.
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parameter_check.h"
#include "flatshard/unit/autograd_task.h"
#include "flatshard/unit/runtime_call.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cctype>
#include <utility>

namespace flatshard {
namespace {

// Like torch's LambdaPostHook, without its header's Python baggage.
class PostHook : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(std::function<void()> action)
      : action_(std::move(action)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list&) override {
    action_();
    return outputs;
  }

 private:
  std::function<void()> action_;
};

}  // namespace

void Runtime::install_hooks() {
  const std::weak_ptr<Runtime> weak = weak_from_this();
  for (const auto& unit : units_) {
    const UnitId id = unit->id();
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const UnitParameter& p = unit->parameters()[i];
      parameters_[p.tensor.unsafeGetTensorImpl()] = {id, i};
      if (unit->groups()[p.group]->trainable()) {
        hook_parameter(id, i);
      }
    }
    if (unit->module() == nullptr) {
      continue;
    }
    nn::Module& module = *unit->module();
    module_hooks_.push_back(module.add_forward_pre_hook(
        [weak, id](nn::Module&, const nn::TensorList& inputs) {
          if (const auto self = weak.lock()) {
            self->forward_begin(id, inputs);
          }
        }));
    module_hooks_.push_back(
        module.add_forward_hook([weak, id](
                                    nn::Module&,
                                    const nn::TensorList&,
                                    const nn::TensorList& outputs) {
          if (const auto self = weak.lock()) {
            self->forward_end(id, outputs);
          }
        }));
    module_hooks_.push_back(module.add_forward_error_hook(
        [weak, id](nn::Module&, std::exception_ptr& error) {
          if (const auto self = weak.lock()) {
            self->forward_error(id);
            self->explain(id, error);
          }
        }));
  }
}

void Runtime::hook_parameter(UnitId unit, std::size_t index) {
  UnitParameter& p = units_[unit]->parameters()[index];
  p.accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
  FLATSHARD_CHECK(
      p.accumulator != nullptr,
      usage,
      "expected parameter {} to be a leaf that requires a gradient",
      p.name);
  p.hook_id = p.accumulator->add_post_hook(
      std::make_unique<PostHook>([weak = weak_from_this(), unit, index] {
        if (const auto self = weak.lock()) {
          self->on_parameter_done(unit, index);
        }
      }));
}

// -- forward -----------------------------------------------------------------

void Runtime::before_root_forward() {
  if (failed()) {
    reset_after_failure();
  }
  observers_.tell([](RuntimeObserver& o) { o.forward_begins(); });
  forget_dead_tensors();
  std::int64_t generation = 0;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      group->weights().adopt_foreign_writes();
    }
    generation += unit->generation();
  }
  if (generation == seen_generation_) {
    return;
  }
  if (strict_) {
    strict_->end_step();
    strict_->weights_changed();
  }
  seen_generation_ = generation;
  if (graph_reads_weights_) {
    graph_reads_weights_ = false;
    hide_all();
  }
  executor_.wait_for_written_weights();
  feed({.kind = EventKind::weights_changed});
  if (executor_.should_replan()) {
    executor_.plan_slots(scheduler_.units(), step_actions_);  // what it did
  }
  step_actions_.clear();
  if (graphs_) {
    graphs_->step_begins(
        executor_.pool().num_held() == 0 && open_calls_.empty() &&
        tasks_.empty());
  }
}

void Runtime::forward_begin(UnitId unit, const nn::TensorList& inputs) {
  if (strict_ && autograd_task::current_id() < 0) {
    say_next(unit);
  }
  const std::lock_guard lock(mutex_);
  auto call = std::make_shared<Call>();
  call->unit = unit;
  call->id = next_call_++;
  call->recompute = autograd_task::current_id() >= 0;
  const bool nested =
      std::any_of(open_calls_.begin(), open_calls_.end(), [](const auto& open) {
        return !open->recompute;
      });
  FLATSHARD_CHECK(
      failure_.empty() || !(nested || call->recompute),
      usage,
      "unit {} was called although this forward or backward failed: {}; let "
      "the exception leave the model, or call reset()",
      units_[unit]->name(),
      failure_);
  if (call->recompute) {
    ensure_task();
  } else if (!nested) {
    open_calls_.clear();
    before_root_forward();
  }
  if (units_[unit]->resident()) {
    units_[unit]->check_storage();  // nothing else looks at it
  }
  if (strict_) {
    strict_->forward_begin(unit, call->id, !call->recompute && !nested);
  }
  call->generation = units_[unit]->generation();
  watch_inputs(call, inputs);
  open_calls_.push_back(call);
  feed(
      {.kind = call->recompute ? EventKind::recompute_begin
                               : EventKind::forward_begin,
       .unit = unit,
       .call = call->id});
  units_[unit]->by_hand = false;
  reveal(*units_[unit]);
}

void Runtime::forward_end(
    UnitId unit,
    const nn::TensorList& outputs,
    bool more_follow) {
  const std::lock_guard lock(mutex_);
  FLATSHARD_CHECK(
      !open_calls_.empty() && open_calls_.back()->unit == unit,
      internal,
      "the forward of {} ended without having begun",
      units_[unit]->name());
  const auto call = open_calls_.back();
  open_calls_.pop_back();
  const bool needs_backward = watch_outputs(call, outputs);
  if (strict_) {
    strict_->forward_end(call->id, needs_backward);
  }
  feed(
      {.kind =
           call->recompute ? EventKind::recompute_end : EventKind::forward_end,
       .unit = unit,
       .call = call->id,
       .needs_backward = needs_backward,
       .more_follow = more_follow});
  hide(*units_[unit]);
  if (open_calls_.empty() && !needs_backward) {
    executor_.end_evaluation();
  }
}

void Runtime::forward_error(UnitId unit) {
  const std::lock_guard lock(mutex_);
  if (open_calls_.empty() || open_calls_.back()->unit != unit) {
    return;  // the hook of this call itself failed before it was opened
  }
  const auto call = open_calls_.back();
  open_calls_.pop_back();
  hide(*units_[unit]);
  if (strict_) {
    strict_->forward_end(call->id, /*needs_backward=*/false);
  }
  try {
    feed(
        {.kind = call->recompute ? EventKind::recompute_end
                                 : EventKind::forward_end,
         .unit = unit,
         .call = call->id});
  } catch (const Error& e) {
    if (e.code() != ErrorCode::comm && e.code() != ErrorCode::timeout &&
        !mesh_->has_verdict()) {
      throw;
    }
    // A peer is gone: the error that ends this forward says so already.
    log_debug("while a forward was given up: {}", e.what());
  }
}

// What torch says of two dtypes that do not fit names no parameter.
void Runtime::explain(UnitId id, std::exception_ptr& error) const {
  const auto advice = [](const Unit& unit, const UnitParameter& p) {
    const char* dtype =
        c10::toString(unit.groups()[p.group]->options().precision.compute);
    return fmt::format(
        "parameter {} of unit {} is gathered as {} "
        "(FullyShardOptions::group.precision.compute): give the unit inputs of "
        "that "
        "dtype, e.g. x.to(at::k{}), or choose another Precision, such as "
        "Precision::full()",
        p.name,
        unit.name(),
        dtype,
        dtype);
  };
  try {
    std::rethrow_exception(error);
  } catch (const nn::ParameterMismatch& e) {
    const auto found = parameters_.find(e.parameter().unsafeGetTensorImpl());
    if (found != parameters_.end()) {
      Unit& unit = *units_[found->second.unit];
      error = std::make_exception_ptr(Error(
          e.code(),
          fmt::format(
              "{}; {}",
              e.message(),
              advice(unit, unit.parameters()[found->second.index]))));
    }
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    Unit& unit = *units_[id];
    if (text.find("type") != std::string::npos && !unit.parameters().empty()) {
      const UnitParameter& p = unit.parameters().front();
      const std::string dtype =
          c10::toString(unit.groups()[p.group]->options().precision.compute);
      const auto same_letter = [](char a, char b) {
        return std::tolower(a) == std::tolower(b);
      };
      if (std::search(
              text.begin(),
              text.end(),
              dtype.begin(),
              dtype.end(),
              same_letter) != text.end()) {
        error = std::make_exception_ptr(Error(
            ErrorCode::usage,
            fmt::format("{}; {}", text, advice(unit, p))));
      }
    }
  } catch (...) {
    // It speaks for itself.
  }
}

Runtime::WatchedTensor& Runtime::watch(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  auto& watched = watched_[{node.get(), tensor.output_nr()}];
  if (!watched || watched->node.lock() != node) {
    watched = std::make_shared<WatchedTensor>();
    watched->node = node;
    tensor.register_hook(std::function<void(at::Tensor)>(
        [weak = weak_from_this(), watched](const at::Tensor&) {
          if (const auto self = weak.lock()) {
            self->on_tensor_grad(*watched);
          }
        }));
  }
  return *watched;
}

void Runtime::forget_dead_tensors() {
  std::erase_if(watched_, [](const auto& entry) {
    return entry.second->node.expired();
  });
}

void Runtime::watch_inputs(
    const std::shared_ptr<Call>& call,
    const nn::TensorList& inputs) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad()) {
      continue;
    }
    if (!input.grad_fn()) {
      // A hook on a leaf would stay with the user's tensor.
      call->has_unwatched_input = true;
      continue;
    }
    ++call->num_watched_inputs;
    watch(input).uses.push_back({call, WatchedTensor::Role::input});
  }
}

bool Runtime::watch_outputs(
    const std::shared_ptr<Call>& call,
    const nn::TensorList& outputs) {
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  const auto add = [&](const at::Tensor& output) {
    if (output.requires_grad() && output.grad_fn()) {
      call->output_nodes.push_back(output.grad_fn());
      watch(output).uses.push_back({call, WatchedTensor::Role::output});
    }
  };
  for (const at::Tensor& output : outputs) {
    add(output);
    if (output.is_view()) {
      // A later in-place operation on a view takes the view's own node out of
      // the graph; that of its base stays.
      add(at::Tensor(output._base()));
    }
  }
  if (call->output_nodes.empty()) {
    return false;
  }
  call->end = next_end_++;
  calls_.push_back(call);
  return true;
}

// -- backward ----------------------------------------------------------------

bool Runtime::failed() {
  // The engine drops the end of a backward that throws.
  return !failure_.empty() ||
         std::any_of(tasks_.begin(), tasks_.end(), [](const auto& task) {
           return task.second.alive.expired();
         });
}

std::vector<std::shared_ptr<Runtime::Call>> Runtime::calls_of_task() {
  std::erase_if(calls_, [](const auto& call) { return call.expired(); });
  std::vector<std::shared_ptr<Call>> calls;  // by their ends, as in calls_
  calls.reserve(calls_.size());
  for (const auto& weak : calls_) {
    const auto call = weak.lock();
    if (std::any_of(
            call->output_nodes.begin(),
            call->output_nodes.end(),
            [](const auto& weak_node) {
              const auto node = weak_node.lock();
              return node && autograd_task::expects(node.get());
            })) {
      calls.push_back(call);
    }
  }
  return calls;
}

namespace {

// The reduction of its backward has counted it as zero.
[[noreturn]] void refuse_late_grad(const Unit& unit, const UnitParameter& p) {
  FLATSHARD_THROW(
      usage,
      "parameter {} of unit {} got its gradient outside of a backward: the "
      "unit was reduced without it when its backward ended. Compute weight "
      "gradients inside the backward; delayed ones are not supported",
      p.name,
      unit.name());
}

}  // namespace

TaskId Runtime::ensure_task(const UnitParameter* arrived) {
  const TaskId task = autograd_task::current_id();
  if (tasks_.contains(task)) {
    return task;
  }
  if (failed()) {
    reset_after_failure();
  }
  if (tasks_.empty()) {
    observers_.tell([](RuntimeObserver& o) { o.backward_begins(); });
    for (const auto& unit : units_) {
      reveal(*unit);  // kept since the forward, or always there
    }
  }
  ScheduleEvent begin{.kind = EventKind::task_begin, .task = task};
  for (const auto& unit : units_) {
    if (tasks_.empty()) {
      // A write since the forward raises the generation, which then differs
      // from the call's.
      for (const auto& group : unit->groups()) {
        group->weights().adopt_foreign_writes();
      }
    }
    int count = 0;
    for (const UnitParameter& p : unit->parameters()) {
      count += p.accumulator && autograd_task::expects(p.accumulator.get());
      if (tasks_.empty() && &p != arrived && p.tensor.grad().defined()) {
        refuse_late_grad(*unit, p);
      }
    }
    if (count > 0) {
      begin.expected.emplace_back(unit->id(), count);
    }
  }
  Task& opened = tasks_[task];
  opened.to_begin = calls_of_task();
  std::map<UnitId, int> num_calls;
  for (const auto& call : opened.to_begin) {
    ++num_calls[call->unit];
  }
  begin.calls.assign(num_calls.begin(), num_calls.end());
  begin.reduces =
      !begin.expected.empty() || !autograd_task::has_chosen_inputs();
  opened.alive = autograd_task::at_end([weak = weak_from_this(), task] {
    if (const auto self = weak.lock()) {
      self->on_task_end(task);
    }
  });
  feed(std::move(begin));
  return task;
}

void Runtime::on_tensor_grad(const WatchedTensor& tensor) {
  const std::lock_guard lock(mutex_);
  const TaskId task = ensure_task();
  for (auto use = tensor.uses.rbegin(); use != tensor.uses.rend(); ++use) {
    if (use->role == WatchedTensor::Role::output) {
      begin_backward_up_to(use->call, task);
    } else {
      input_grad_arrived(use->call, task);
    }
  }
}

void Runtime::begin_backward_up_to(
    const std::shared_ptr<Call>& call,
    TaskId task) {
  auto& to_begin = tasks_.at(task).to_begin;
  while (!to_begin.empty() && to_begin.back()->end >= call->end) {
    const auto next = std::move(to_begin.back());
    to_begin.pop_back();
    begin_backward(*next, task);
  }
  begin_backward(*call, task);
}

void Runtime::begin_backward(Call& call, TaskId task) {
  if (call.inputs_left.contains(task)) {
    return;  // another output was first
  }
  const Unit& unit = *units_[call.unit];
  FLATSHARD_CHECK(
      call.generation == unit.generation(),
      usage,
      "the weights of unit {} changed between its forward and its backward; "
      "step the optimizer only when no backward is to come",
      unit.name());
  FLATSHARD_CHECK(
      unit.resident() || !at::GradMode::is_enabled(),
      usage,
      "backward with create_graph would read the weights of unit {} after "
      "they are released; use zero0, zero1 or zero2",
      unit.name());
  graph_reads_weights_ |= at::GradMode::is_enabled();
  units_[call.unit]->by_hand = false;
  call.inputs_left[task] = call.num_watched_inputs;
  if (strict_) {
    strict_->backward_begin(call.id);
  }
  observers_.tell(
      [&](RuntimeObserver& o) { o.backward_began(*units_[call.unit]); });
  feed(
      {.kind = EventKind::backward_begin,
       .unit = call.unit,
       .call = call.id,
       .task = task,
       // Without an input to watch the unit stays until the task ends: its last
       // gradient does not say that nobody reads its weights any more (frozen
       // ones that a child uses, a recompute inside its forward).
       .waits_for_inputs = true});
}

void Runtime::input_grad_arrived(
    const std::shared_ptr<Call>& call,
    TaskId task) {
  const auto left = call->inputs_left.find(task);
  if (left == call->inputs_left.end() || left->second == 0) {
    return;
  }
  if (--left->second == 0 && !call->has_unwatched_input) {
    feed(
        {.kind = EventKind::inputs_done,
         .unit = call->unit,
         .call = call->id,
         .task = task});
  }
}

std::optional<nn::WgradTarget> Runtime::begin_wgrad(
    const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
  if (found == parameters_.end()) {
    return std::nullopt;
  }
  Unit& unit = *units_[found->second.unit];
  const UnitParameter& p = unit.parameters()[found->second.index];
  if (!p.accumulator) {
    return std::nullopt;
  }
  if (autograd_task::current_id() < 0) {
    refuse_late_grad(unit, p);
  }
  ensure_task();
  // With backward(inputs=...) or grad() this parameter may not be asked for.
  if (!autograd_task::expects(p.accumulator.get())) {
    return std::nullopt;
  }
  return nn::WgradTarget{
      unit.grad_view(executor_.grads_slot(unit), p),
      /*accumulate=*/p.in_slot};
}

void Runtime::end_wgrad(const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const ParameterRef ref = parameters_.at(parameter.unsafeGetTensorImpl());
  units_[ref.unit]->parameters()[ref.index].in_slot = true;
}

void Runtime::on_parameter_done(UnitId unit, std::size_t index) {
  const std::lock_guard lock(mutex_);
  UnitParameter& p = units_[unit]->parameters()[index];
  const TaskId task = ensure_task(&p);
  if (strict_) {
    strict_->parameter_done(unit, p.name);
  }
  const at::Tensor grad = std::exchange(p.tensor.mutable_grad(), {});
  if (grad.defined()) {
    const at::NoGradGuard no_grad;
    p.pending_grad = p.pending_grad.defined() ? p.pending_grad.add(grad) : grad;
  }
  feed({.kind = EventKind::wgrad_done, .unit = unit, .task = task});
}

void Runtime::recompute_begin(nn::Module& owner) {
  const std::lock_guard lock(mutex_);
  if (autograd_task::current_id() >= 0) {
    ensure_task();
  }
}

void Runtime::recompute_end(nn::Module&) {
}

void Runtime::on_task_end(TaskId task) {
  const std::lock_guard lock(mutex_);
  if (tasks_.erase(task) == 0) {
    return;  // dropped by a reset
  }
  const bool outermost = tasks_.empty();
  ScheduleEvent end{
      .kind = EventKind::task_end,
      .task = task,
      .outermost = outermost};
  for (const auto& unit : units_) {
    if (unit->has_unreduced_grad()) {
      end.unfinished.push_back(unit->id());
    }
  }
  feed(std::move(end));
  if (!outermost) {
    return;
  }
  hide_all();
  forget_dead_tensors();
  if (failure_.empty()) {
    try {
      executor_.drop_unused_grads();
    } catch (const std::exception& e) {
      failure_ = e.what();
      throw;
    }
  }
  observers_.tell([](RuntimeObserver& o) { o.backward_ended(); });
  if (failure_.empty() && !scheduler_.in_forward()) {
    FLATSHARD_CHECK(
        scheduler_.resting(),
        internal,
        "after the backward these units do not rest: {}",
        fmt::join(scheduler_.restless_units(), ", "));
  }
}

}  // namespace flatshard
