// Hooks on tensors and gradient accumulators become events for the Scheduler.
#include "flatshard/autograd/autograd_events.h"

#include "flatshard/autograd/autograd_task.h"
#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
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

AutogradEvents::AutogradEvents(const Units& units, AutogradListener& listener)
    : units_(units), listener_(listener) {
  for (const auto& unit : units_) {
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const UnitParameter& p = unit->parameters()[i];
      parameters_[p.tensor.unsafeGetTensorImpl()] = {unit->id(), i};
    }
    accumulators_.emplace_back(unit->parameters().size());
  }
}

AutogradEvents::~AutogradEvents() {
  unhook(accumulators_);
}

void AutogradEvents::unhook(const Accumulators& accumulators) {
  for (const auto& of_unit : accumulators) {
    for (const Accumulator& accumulator : of_unit) {
      if (accumulator.hook_id != 0) {
        accumulator.node->del_post_hook(accumulator.hook_id);
      }
    }
  }
}

void AutogradEvents::install_hooks(std::weak_ptr<AutogradListener> hooks) {
  hooks_ = std::move(hooks);
  hook_parameters();
}

void AutogradEvents::hook_parameters() {
  for (const auto& unit : units_) {
    for (std::size_t i = 0; i < unit->parameters().size(); ++i) {
      const UnitParameter& p = unit->parameters()[i];
      if (unit->groups()[p.group]->trainable()) {
        hook_parameter({unit->id(), i});
      }
    }
  }
}

void AutogradEvents::hook_parameter(ParameterRef ref) {
  const UnitParameter& p = parameter(ref);
  Accumulator& accumulator = accumulators_[ref.unit][ref.index];
  // A frozen parameter may be trained later, by the same node.
  const bool requires_grad = p.tensor.requires_grad();
  if (!requires_grad && p.tensor.is_leaf()) {
    p.tensor.set_requires_grad(true);
  }
  accumulator.node = torch::autograd::impl::grad_accumulator(p.tensor);
  if (!requires_grad && p.tensor.is_leaf()) {
    p.tensor.set_requires_grad(false);
  }
  FLATSHARD_CHECK(
      accumulator.node != nullptr,
      usage,
      "expected parameter {} to be a leaf that requires a gradient",
      p.name);
  accumulator.hook_id = accumulator.node->add_post_hook(
      std::make_unique<PostHook>([hooks = hooks_, ref] {
        if (const auto self = hooks.lock()) {
          self->on_parameter_done(ref);
        }
      }));
}

AutogradEvents::OwnAccumulators::OwnAccumulators(AutogradEvents& events)
    : events_(events), others_(events.accumulators_) {
  for (std::size_t u = 0; u < others_.size(); ++u) {
    for (std::size_t i = 0; i < others_[u].size(); ++i) {
      events_.accumulators_[u][i] = {};
      if (others_[u][i].node) {
        torch::autograd::impl::set_grad_accumulator(
            events_.units_[u]->parameters()[i].tensor,
            detail::WeakPtrOf<NodePtr>::type(NodePtr()));
      }
    }
  }
  events_.hook_parameters();
}

AutogradEvents::OwnAccumulators::~OwnAccumulators() {
  unhook(events_.accumulators_);
  for (std::size_t u = 0; u < others_.size(); ++u) {
    for (std::size_t i = 0; i < others_[u].size(); ++i) {
      if (others_[u][i].node) {
        torch::autograd::impl::set_grad_accumulator(
            events_.units_[u]->parameters()[i].tensor,
            detail::WeakPtrOf<NodePtr>::type(others_[u][i].node));
      }
    }
  }
  events_.accumulators_ = std::move(others_);
}

void AutogradEvents::reset() {
  tasks_.clear();
  passes_.give_up();
  watched_.clear();
}

bool AutogradEvents::in_backward() {
  return autograd_task::current_id() >= 0;
}

bool AutogradEvents::in_forward() const {
  return std::any_of(
      open_calls_.begin(),
      open_calls_.end(),
      [](const auto& open) { return !open->recompute; });
}

bool AutogradEvents::is_open(UnitId unit) const {
  return std::any_of(
      open_calls_.begin(),
      open_calls_.end(),
      [unit](const auto& open) { return open->unit == unit; });
}

bool AutogradEvents::has_dead_task() const {
  return std::any_of(tasks_.begin(), tasks_.end(), [](const auto& task) {
    return task.second.alive.expired();
  });
}

const ParameterRef* AutogradEvents::find(const at::Tensor& tensor) const {
  const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
  return found == parameters_.end() ? nullptr : &found->second;
}

// -- forward -----------------------------------------------------------------

void AutogradEvents::forward_begin(UnitId unit, const nn::TensorList& inputs) {
  auto call = std::make_shared<UnitCall>();
  call->unit = unit;
  call->id = next_call_++;
  call->recompute = in_backward();
  const bool outermost = !call->recompute && !in_forward();
  if (outermost) {
    open_calls_.clear();  // recomputes that an exception left open
  }
  listener_.forward_begins(unit, outermost);
  if (call->recompute) {
    enter_task();
  }
  call->generation = units_[unit]->weights().generation();
  watch_inputs(call, inputs);
  open_calls_.push_back(call);
  listener_.feed(
      {.kind = call->recompute ? EventKind::recompute_begin
                               : EventKind::forward_begin,
       .unit = unit,
       .call = call->id});
}

AutogradEvents::EndedForward AutogradEvents::forward_end(
    UnitId unit,
    const nn::TensorList& outputs,
    bool more_follow,
    bool runs_later) {
  FLATSHARD_CHECK(
      !open_calls_.empty() && open_calls_.back()->unit == unit,
      internal,
      "the forward of {} ended but never started",
      units_[unit]->name());
  const auto call = std::move(open_calls_.back());
  open_calls_.pop_back();
  const EndedForward ended{
      .call = call->id,
      .needs_backward = watch_outputs(call, outputs) ||
                        (runs_later && at::GradMode::is_enabled()),
      .outermost = !call->recompute && !in_forward()};
  listener_.feed(
      {.kind =
           call->recompute ? EventKind::recompute_end : EventKind::forward_end,
       .unit = unit,
       .call = call->id,
       .needs_backward = ended.needs_backward,
       .more_follow = more_follow,
       .kept_nbytes = call->kept_nbytes});
  return ended;
}

std::optional<AutogradEvents::OpenCall> AutogradEvents::add_kept(
    std::int64_t nbytes) {
  if (open_calls_.empty() || open_calls_.back()->recompute || in_backward()) {
    return std::nullopt;
  }
  UnitCall& call = *open_calls_.back();
  call.kept_nbytes += nbytes;
  return OpenCall{call.unit, call.id};
}

void AutogradEvents::forward_error(UnitId unit) {
  if (open_calls_.empty() || open_calls_.back()->unit != unit) {
    return;  // the hook of this call itself failed before it was opened
  }
  const auto call = std::move(open_calls_.back());
  open_calls_.pop_back();
  listener_.feed(
      {.kind =
           call->recompute ? EventKind::recompute_end : EventKind::forward_end,
       .unit = unit,
       .call = call->id});
}

void AutogradEvents::watch_inner(UnitId unit, const nn::TensorList& tensors) {
  const auto open = std::find_if(
      open_calls_.rbegin(),
      open_calls_.rend(),
      [&](const auto& call) { return call->unit == unit; });
  if (open == open_calls_.rend() || !at::GradMode::is_enabled()) {
    return;
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.requires_grad() && tensor.grad_fn()) {
      WatchedTensor& watched = watch(tensor);
      (*open)->output_nodes.push_back(watched.node);
      watched.uses.push_back({*open, /*is_output=*/true});
    }
  }
}

void AutogradEvents::stamp(UnitId unit) {
  const std::int64_t generation = units_[unit]->weights().generation();
  for (const auto& call : open_calls_) {
    if (call->unit == unit) {
      call->generation = generation;
    }
  }
  for (const auto& weak : calls_) {
    if (const auto call = weak.lock(); call && call->unit == unit) {
      call->generation = generation;
    }
  }
}

WatchedTensor& AutogradEvents::watch(const at::Tensor& tensor) {
  const NodePtr node = tensor.grad_fn()
                           ? tensor.grad_fn()
                           : torch::autograd::impl::grad_accumulator(tensor);
  auto& watched = watched_[{node.get(), tensor.output_nr()}];
  if (!watched || watched->node.lock() != node) {
    watched = std::make_shared<WatchedTensor>();
    watched->node = node;
    tensor.register_hook(std::function<void(at::Tensor)>(
        [hooks = hooks_, watched](const at::Tensor&) {
          if (const auto self = hooks.lock()) {
            self->on_tensor_grad(*watched);
          }
        }));
  }
  return *watched;
}

void AutogradEvents::forget_dead_tensors() {
  std::erase_if(watched_, [](const auto& entry) {
    return entry.second->node.expired();
  });
  // Those tensors were its last owners.
  std::erase_if(calls_, [](const auto& call) { return call.expired(); });
}

void AutogradEvents::watch_inputs(
    const std::shared_ptr<UnitCall>& call,
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
      if (call->recompute) {
        call->leaf_inputs.push_back(input.unsafeGetTensorImpl());
      }
      continue;
    }
    ++call->num_watched_inputs;
    watch(input).uses.push_back({call, /*is_output=*/false});
  }
}

bool AutogradEvents::watch_outputs(
    const std::shared_ptr<UnitCall>& call,
    const nn::TensorList& outputs) {
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  const auto add = [&](const at::Tensor& output) {
    if (!output.requires_grad()) {
      return;
    }
    const auto& leaves = call->leaf_inputs;
    if (output.grad_fn() ||
        std::ranges::find(leaves, output.unsafeGetTensorImpl()) !=
            leaves.end()) {
      WatchedTensor& watched = watch(output);
      call->output_nodes.push_back(watched.node);
      watched.uses.push_back({call, /*is_output=*/true});
    }
  };
  for (const at::Tensor& output : outputs) {
    add(output);
    if (output.is_view()) {
      // A later in-place operation on a view removes the view's own node from
      // the graph, while the node of its base stays.
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

}  // namespace flatshard
