#include "flatshard/core/error.h"
#include "flatshard/graphs/region_graph.h"
#include "flatshard/graphs/static_tensor.h"
#include "flatshard/nn/module_generators.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/runtime/runtime.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

namespace flatshard {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RegionGraph::Open : torch::CustomClassHolder {
  std::shared_ptr<RegionGraph> region;
  std::int64_t number = 0;
  std::vector<bool> is_leaf;    // by input
  GeneratorStates states;       // before the forward; for a recompute
  std::shared_ptr<void> waits;  // for its backward
  std::shared_ptr<void> use;    // null: its backward was
  std::int64_t clock = 0;       // at the forward
};

struct RegionGraph::ReplayFunction
    : torch::autograd::Function<RegionGraph::ReplayFunction> {
  // `all` has the inputs, then the parameters that get gradients.
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList all,
      const c10::intrusive_ptr<Open>& open) {
    ctx->saved_data["open"] = c10::IValue::make_capsule(open);
    ctx->set_materialize_grads(false);
    const auto num_inputs =
        static_cast<std::ptrdiff_t>(open->region->inputs_.size());
    const RegionGraph& region = *open->region;
    variable_list outputs = open->region->outputs_of_replay(
        nn::TensorList(all.begin(), all.begin() + num_inputs),
        open->use);
    variable_list constants;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (region.is_constant_[i]) {
        constants.push_back(outputs[i]);
      }
    }
    ctx->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["open"].toCapsule();
    auto& open = static_cast<Open&>(*capsule);
    variable_list out = open.region->backward(open, grads);
    out.emplace_back();  // the capsule
    return out;
  }
};

std::size_t RegionGraph::num_used() const {
  return static_cast<std::size_t>(std::count_if(
      accumulators_.begin(),
      accumulators_.end(),
      [](const NodePtr& node) { return static_cast<bool>(node); }));
}

const char* RegionGraph::miss(const nn::TensorList& inputs) {
  if (!captured_ || inputs.size() != inputs_.size()) {
    return "it was not captured";
  }
  if (!waits_.expired()) {
    return "an earlier forward of it waits for its backward";
  }
  if (nn::in_second_run() != call_.in_second_run) {
    return "it is in another run of a recomputed part";
  }
  if (uses_->blocks(forward_number_)) {
    return kInUse;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& in = inputs[i];
    const at::Tensor& memory = inputs_[i];
    if (!same_kind(in, memory)) {
      return "an input has another shape, layout or dtype";
    }
    if (with_grad_ && in.requires_grad() != memory.requires_grad()) {
      return "an input needs a gradient and did not, or the other way round";
    }
    if (chained_[i] && in.const_data_ptr() != memory.const_data_ptr() &&
        !chained_[i]->forward_use_.expired()) {
      copied_inputs_.insert(i);
      return kOtherInput;
    }
  }
  if (parameter_addresses() != forward_addresses_ ||
      !planes_are_there(forward_planes_)) {
    return "the unit's weights are at other addresses";
  }
  return nullptr;
}

bool RegionGraph::planes_are_there(
    const std::shared_ptr<PlanePlaces>& planes) const {
  if (planes == nullptr) {
    return true;
  }
  const auto runtime = runtime_.lock();
  FLATSHARD_CHECK(runtime != nullptr, usage, "{}: its Runtime is gone", name_);
  return planes->await(runtime->calls());
}

nn::TensorList RegionGraph::outputs_of_replay(
    const nn::TensorList& inputs,
    const std::shared_ptr<void>& use) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].const_data_ptr() != inputs_[i].const_data_ptr()) {
      without_repeats(inputs_[i].variable_data())
          .copy_(without_repeats(inputs[i].detach()));
    }
  }
  forward_->replay();
  nn::TensorList outputs;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const int alias = aliased_input_[i];
    outputs.push_back(hand_out(
        outputs_[i],
        use,
        alias < 0 ? at::Tensor() : inputs[alias].detach()));
  }
  return outputs;
}

nn::TensorList RegionGraph::replay(const nn::TensorList& inputs) {
  ++num_forwards_;
  if (!with_grad_) {
    const at::NoGradGuard no_grad;
    const auto use = uses_->begin(forward_number_);
    forward_use_ = use;
    return outputs_of_replay(inputs, use);
  }
  auto open = c10::make_intrusive<Open>();
  open->region = shared_from_this();
  open->number = num_forwards_;
  open->use = uses_->begin(forward_number_);
  open->clock = uses_->clock();
  forward_use_ = open->use;
  open->waits = std::make_shared<int>();
  waits_ = open->waits;
  if (call_.preserve_rng && owner_.module != nullptr) {
    open->states = nn::generator_states(*owner_.module, inputs);
  }
  variable_list all = inputs;
  for (const at::Tensor& input : inputs) {
    open->is_leaf.push_back(input.requires_grad() && !input.grad_fn());
  }
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    if (accumulators_[i]) {
      all.push_back(unit_.parameters()[i].tensor);
    }
  }
  nn::TensorList outputs = ReplayFunction::apply(at::TensorList(all), open);
  keep_moved(open->states);
  return outputs;
}

const char* RegionGraph::miss_of_backward(
    const nn::TensorList& grads,
    const std::vector<std::optional<nn::WgradTarget>>& targets) {
  if (!backward_) {
    return "its backward was not captured";
  }
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const auto consumer = chained_grads_[i].lock();
    if (consumer && !consumer->backward_use_.expired() &&
        (!grads[i].defined() ||
         grads[i].const_data_ptr() != grad_outputs_[i].const_data_ptr())) {
      copied_grads_.insert(i);
      return kOtherGradient;
    }
    if (grads[i].defined() &&
        (grads[i].scalar_type() != grad_outputs_[i].scalar_type() ||
         grads[i].sizes() != grad_outputs_[i].sizes())) {
      return "the gradient of an output has another shape or dtype";
    }
  }
  if (uses_->blocks(backward_number_)) {
    return kInUse;
  }
  if (parameter_addresses() != backward_addresses_ ||
      !planes_are_there(backward_planes_)) {
    return "the unit's weights are at other addresses in the backward";
  }
  for (std::size_t i = 0; i < written_.size(); ++i) {
    const auto& target = targets[i];
    if (!target) {
      return "a parameter gets no gradient in this backward";
    }
    if (target->accumulate != written_[i].accumulate) {
      return "the unit has gradients of an earlier backward or another call";
    }
    if (target->grad.const_data_ptr() != written_[i].data) {
      return "the unit's gradients are at other addresses";
    }
  }
  return nullptr;
}

nn::TensorList RegionGraph::backward(Open& open, const nn::TensorList& grads) {
  FLATSHARD_CHECK(
      !at::GradMode::is_enabled(),
      usage,
      "{}: expected a backward without create_graph, got create_graph=true: a "
      "CUDA graph has no second derivative; switch graphs off for it",
      name_);
  FLATSHARD_CHECK(
      captured_ && open.number == num_forwards_,
      usage,
      "{}: its backward comes after {}, so the tensors that its forward saved "
      "are gone",
      name_,
      captured_ ? "another forward of it" : "its graphs were dropped");
  FLATSHARD_CHECK(
      open.use || !uses_->began_before(forward_number_, open.clock),
      usage,
      "{}: its second backward (retain_graph) comes after another forward, so "
      "the tensors that its own forward saved may be overwritten; run it "
      "before, or turn graphs off for it",
      name_);
  const std::shared_ptr<nn::WgradSink> sink = runtime_.lock();
  FLATSHARD_CHECK(sink != nullptr, usage, "{}: its Runtime is gone", name_);
  // The slot is first, because waits for its former users are queued before the
  // launch.
  std::vector<std::optional<nn::WgradTarget>> targets;
  for (const Written& w : written_) {
    targets.push_back(
        sink->begin_wgrad(unit_.parameters()[w.parameter].tensor));
  }
  const char* miss = miss_of_backward(grads, targets);
  const RestoreGenerators before = redraw_numbers(open.states);
  nn::TensorList out;
  if (miss == nullptr) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      at::Tensor& memory = grad_outputs_[i];
      if (!grads[i].defined()) {
        memory.zero_();
      } else if (grads[i].const_data_ptr() != memory.const_data_ptr()) {
        memory.copy_(grads[i]);
      }
    }
    const auto use = uses_->begin(backward_number_);
    backward_use_ = use;
    backward_->replay();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor& grad = backward_->outputs()[i];
      if (!grad.defined()) {
        out.emplace_back();
      } else if (open.is_leaf[i]) {
        out.push_back(grad.clone());  // its owner may keep it
      } else {
        out.push_back(hand_out(grad, use));
      }
    }
    out.resize(inputs_.size() + num_used());
    for (const Written& w : written_) {
      sink->end_wgrad(unit_.parameters()[w.parameter].tensor);
    }
  } else {
    TargetSink taken;
    for (std::size_t i = 0; i < written_.size(); ++i) {
      if (targets[i]) {
        taken.add(
            unit_.parameters()[written_[i].parameter].tensor,
            *targets[i]);
      }
    }
    out = differentiate(grads, taken);
    for (std::size_t i = 0; i < written_.size(); ++i) {
      const at::Tensor& parameter =
          unit_.parameters()[written_[i].parameter].tensor;
      if (taken.written(parameter)) {
        sink->end_wgrad(parameter);
      }
    }
  }
  open.waits.reset();
  open.use.reset();
  if (on_backward_) {
    on_backward_(*this, miss);
  }
  return out;
}

}  // namespace flatshard
