#include "flatshard/unit/region_graph.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/generator_states.h"
#include "flatshard/nn/module.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tensor over the memory of a graph, as its user sees it. It keeps `use`, and
// `other`, whose memory it is too.
at::Tensor hand_out(
    const at::Tensor& memory,
    std::shared_ptr<void> use,
    at::Tensor other = {}) {
  return at::from_blob(
      memory.data_ptr(),
      memory.sizes(),
      memory.strides(),
      [use = std::move(use), other = std::move(other)](void*) {},
      memory.options(),
      memory.device());
}

// Layers with these contexts ask another sink while this lives.
class SinkScope {
 public:
  SinkScope(
      const std::vector<nn::ModuleContextPtr>& contexts,
      nn::WgradSink& sink)
      : contexts_(contexts) {
    other_ = std::shared_ptr<nn::WgradSink>(&sink, [](nn::WgradSink*) {});
    for (const nn::ModuleContextPtr& context : contexts_) {
      before_.push_back(context->wgrad_sink);
      context->wgrad_sink = other_;
    }
  }
  ~SinkScope() {
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      contexts_[i]->wgrad_sink = before_[i];
    }
  }
  SinkScope(const SinkScope&) = delete;
  SinkScope& operator=(const SinkScope&) = delete;

 private:
  const std::vector<nn::ModuleContextPtr>& contexts_;
  std::shared_ptr<nn::WgradSink> other_;
  std::vector<std::weak_ptr<nn::WgradSink>> before_;
};

// What `expand` repeats is one element in memory, which is written once.
at::Tensor without_repeats(at::Tensor tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
    }
  }
  return tensor;
}

}  // namespace

// While it lives, parameters have the accumulators of the recorded graph: those
// of the unit belong to the stream that made them, and a recording may not wait
// for another stream.
class RegionGraph::ParameterScope {
 public:
  explicit ParameterScope(RegionGraph& region) : region_(region) {
    const auto& parameters = region.unit_.parameters();
    region.accumulators_.resize(parameters.size());
    own_.resize(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i].tensor;
      if (parameter.requires_grad()) {
        own_[i] = torch::autograd::impl::try_get_grad_accumulator(parameter);
        set(parameter, region.accumulators_[i]);
      }
    }
  }
  ~ParameterScope() {
    const auto& parameters = region_.unit_.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i].tensor;
      if (parameter.requires_grad()) {
        region_.accumulators_[i] =
            torch::autograd::impl::try_get_grad_accumulator(parameter);
        set(parameter, own_[i]);
      }
    }
  }
  ParameterScope(const ParameterScope&) = delete;
  ParameterScope& operator=(const ParameterScope&) = delete;

 private:
  static void set(const at::Tensor& parameter, const NodePtr& accumulator) {
    torch::autograd::impl::set_grad_accumulator(
        parameter,
        detail::WeakPtrOf<NodePtr>::type(accumulator));
  }

  RegionGraph& region_;
  std::vector<NodePtr> own_;
};

// -- one forward and its backward --------------------------------------------

struct RegionGraph::Open : torch::CustomClassHolder {
  std::shared_ptr<RegionGraph> region;
  std::int64_t number = 0;
  std::vector<bool> is_leaf;    // by input
  GeneratorStates states;       // before the forward; a recomputation's
  std::shared_ptr<void> waits;  // for its backward
  std::shared_ptr<void> use;    // null: its backward was
  std::int64_t clock = 0;       // at the forward
};

struct RegionGraph::ReplayFunction
    : torch::autograd::Function<RegionGraph::ReplayFunction> {
  // inputs, then the parameters that get gradients.
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

RegionGraph::RegionGraph(
    std::string name,
    RegionOwner owner,
    Unit& unit,
    std::weak_ptr<nn::WgradSink> sink,
    std::shared_ptr<GraphUses> uses,
    bool with_grad,
    OnBackward on_backward)
    : name_(std::move(name)),
      owner_(std::move(owner)),
      unit_(unit),
      sink_(std::move(sink)),
      uses_(std::move(uses)),
      with_grad_(with_grad),
      on_backward_(std::move(on_backward)) {
}

RegionGraph::~RegionGraph() = default;

std::vector<const void*> RegionGraph::parameter_addresses() const {
  std::vector<const void*> addresses;
  for (const UnitParameter& p : unit_.parameters()) {
    addresses.push_back(p.tensor.const_data_ptr());
  }
  return addresses;
}

std::size_t RegionGraph::num_used() const {
  return static_cast<std::size_t>(std::count_if(
      accumulators_.begin(),
      accumulators_.end(),
      [](const NodePtr& node) { return static_cast<bool>(node); }));
}

// -- capture -----------------------------------------------------------------

nn::TensorList RegionGraph::run_forward() {
  // With recompute the backward runs it again; nothing is kept in between.
  const at::AutoGradMode grad_mode(with_grad_ && !call_.recompute);
  const ParameterScope parameters(*this);
  live_ = call_.fn(inputs_);
  nn::TensorList outputs;
  aliased_input_.clear();
  is_constant_.clear();
  for (const at::Tensor& output : live_) {
    outputs.push_back(output.detach());
    is_constant_.push_back(!call_.recompute && !output.requires_grad());
    const auto same = std::find_if(
        inputs_.begin(),
        inputs_.end(),
        [&](const at::Tensor& input) {
          return input.const_data_ptr() == output.const_data_ptr();
        });
    aliased_input_.push_back(
        same == inputs_.end() ? -1 : static_cast<int>(same - inputs_.begin()));
  }
  return outputs;
}

void RegionGraph::capture_forward(GraphPool& pool) {
  drop();
  for (const Input& input : call_.inputs) {
    const std::size_t i = inputs_.size();
    const bool chained = input.source && input.source->captured_ &&
                         input.source_output < input.source->outputs_.size() &&
                         !copied_inputs_.contains(i);
    at::Tensor memory =
        chained ? input.source->outputs_[input.source_output].variable_data()
                : at::empty_strided(input.sizes, input.strides, input.options);
    if (!chained && !memory.is_floating_point()) {
      without_repeats(memory).zero_();  // indices, which a CPU's capture uses
    }
    memory.set_requires_grad(input.requires_grad && with_grad_);
    inputs_.push_back(std::move(memory));
    chained_.push_back(chained ? input.source : nullptr);
  }
  forward_addresses_ = parameter_addresses();
  forward_number_ = uses_->next();
  forward_ = pool.capture([this] { return run_forward(); }, owner_.generators);
  outputs_ = forward_->outputs();
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    FLATSHARD_CHECK(
        outputs_[i].is_floating_point(),
        usage,
        "{}: expected outputs of a floating-point dtype, got {}",
        name_,
        c10::toString(outputs_[i].scalar_type()));
    if (aliased_input_[i] >= 0) {
      outputs_[i] = inputs_[aliased_input_[i]].variable_data();
    }
  }
  captured_ = true;
}

nn::TensorList RegionGraph::differentiate(
    const nn::TensorList& grads,
    TargetSink& sink) {
  const auto done = c10::make_scope_exit([&] {
    if (call_.recompute) {
      live_.clear();  // the accumulators are held by then
    }
  });
  const SinkScope layers(owner_.contexts, sink);
  const ParameterScope parameters(*this);
  if (call_.recompute) {
    const at::AutoGradMode grad_mode(true);
    live_ = call_.fn(inputs_);
  }
  variable_list roots;
  variable_list root_grads;
  for (std::size_t i = 0; i < live_.size(); ++i) {
    if (grads[i].defined() && live_[i].requires_grad()) {
      roots.push_back(live_[i]);
      root_grads.push_back(grads[i]);
    }
  }
  variable_list wanted;
  for (const at::Tensor& input : inputs_) {
    if (input.requires_grad()) {
      wanted.push_back(input);
    }
  }
  std::vector<std::size_t> used;
  for (std::size_t i = 0; i < unit_.parameters().size(); ++i) {
    const UnitParameter& p = unit_.parameters()[i];
    if (torch::autograd::impl::try_get_grad_accumulator(p.tensor)) {
      used.push_back(i);
      wanted.push_back(p.tensor);
    }
  }
  const variable_list found = torch::autograd::grad(
      roots,
      wanted,
      root_grads,
      /*retain_graph=*/!call_.recompute,
      /*create_graph=*/false,
      /*allow_unused=*/true);
  const at::NoGradGuard no_grad;
  nn::TensorList out;
  auto next = found.begin();
  for (const at::Tensor& input : inputs_) {
    out.push_back(input.requires_grad() ? *next++ : at::Tensor());
  }
  for (const std::size_t i : used) {
    const at::Tensor& parameter = unit_.parameters()[i].tensor;
    at::Tensor grad = *next++;
    if (grad.defined()) {
      if (auto target = sink.begin_wgrad(parameter)) {
        target->accumulate ? target->grad.add_(grad) : target->grad.copy_(grad);
        sink.end_wgrad(parameter);
        grad = at::Tensor();
      }
    }
    out.push_back(grad);
  }
  return out;
}

void RegionGraph::capture_backward(
    GraphPool& pool,
    const std::vector<Consumer>& consumers,
    TargetSink& targets) {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const Consumer& consumer = consumers[i];
    const bool chained =
        consumer.region && consumer.region->backward_ &&
        consumer.region->backward_->outputs()[consumer.input].defined() &&
        !copied_grads_.contains(i);
    grad_outputs_.push_back(
        chained ? consumer.region->backward_->outputs()[consumer.input]
                : at::empty_like(outputs_[i]));
    chained_grads_.push_back(chained ? consumer.region : nullptr);
  }
  backward_addresses_ = parameter_addresses();
  backward_number_ = uses_->next();
  TargetSink sink;
  for (const UnitParameter& p : unit_.parameters()) {
    if (const auto target = targets.begin_wgrad(p.tensor)) {
      sink.add(p.tensor, *target);
    }
  }
  const auto first = std::make_shared<TargetSink>(sink);
  // On the CPU each replay runs this again.
  backward_ = pool.capture(
      [this, sink, next = first]() mutable {
        const auto now =
            next != nullptr ? next : std::make_shared<TargetSink>(sink);
        next = nullptr;
        return grads_of_inputs(*now);
      },
      owner_.generators);
  for (std::size_t i = 0; i < unit_.parameters().size(); ++i) {
    const at::Tensor& parameter = unit_.parameters()[i].tensor;
    if (first->written(parameter)) {
      const auto target = sink.begin_wgrad(parameter);
      written_.push_back(
          {i, target->grad.const_data_ptr(), target->accumulate});
      targets.end_wgrad(parameter);
    }
  }
}

nn::TensorList RegionGraph::grads_of_inputs(TargetSink& sink) {
  nn::TensorList out = differentiate(grad_outputs_, sink);
  for (std::size_t i = 0; i < out.size(); ++i) {
    FLATSHARD_CHECK(
        i < inputs_.size() || !out[i].defined(),
        usage,
        "{}: parameter {} has no place in the unit's gradient slot",
        name_,
        i - inputs_.size());
    // Who gave a gradient may write it again before this one is read.
    if (out[i].defined() && std::any_of(
                                grad_outputs_.begin(),
                                grad_outputs_.end(),
                                [&](const at::Tensor& grad) {
                                  return grad.const_data_ptr() ==
                                         out[i].const_data_ptr();
                                })) {
      out[i] = out[i].clone();
    }
  }
  out.resize(inputs_.size());
  return out;
}

void RegionGraph::drop() {
  captured_ = false;
  forward_.reset();
  backward_.reset();
  live_.clear();
  inputs_.clear();
  chained_.clear();
  outputs_.clear();
  aliased_input_.clear();
  is_constant_.clear();
  grad_outputs_.clear();
  chained_grads_.clear();
  accumulators_.clear();
  written_.clear();
}

// -- replay ------------------------------------------------------------------

const char* RegionGraph::miss(const nn::TensorList& inputs) {
  if (!captured_ || inputs.size() != inputs_.size()) {
    return "it was not captured";
  }
  if (!waits_.expired()) {
    return "an earlier forward of it waits for its backward";
  }
  if (uses_->blocks(forward_number_)) {
    return kInUse;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& in = inputs[i];
    const at::Tensor& memory = inputs_[i];
    if (in.sizes() != memory.sizes() || in.strides() != memory.strides() ||
        in.scalar_type() != memory.scalar_type() ||
        in.device() != memory.device()) {
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
  const auto& parameters = unit_.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].tensor.const_data_ptr() != forward_addresses_[i]) {
      return "the unit's weights lie elsewhere";
    }
  }
  return nullptr;
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
    if (chained_grads_[i] && !chained_grads_[i]->backward_use_.expired() &&
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
  const auto& parameters = unit_.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].tensor.const_data_ptr() != backward_addresses_[i]) {
      return "the unit's weights lie elsewhere in the backward";
    }
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
      return "the unit's gradients lie elsewhere";
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
      "{}: its backward comes after {}, which took what its forward had saved",
      name_,
      captured_ ? "another forward of it" : "its graphs were dropped");
  FLATSHARD_CHECK(
      open.use || !uses_->began_before(forward_number_, open.clock),
      usage,
      "{}: its second backward (retain_graph) comes after another forward, "
      "which may have taken what its own had saved; run it before, or switch "
      "graphs off for it",
      name_);
  const auto sink = sink_.lock();
  FLATSHARD_CHECK(sink != nullptr, usage, "{}: its Runtime is gone", name_);
  // The slot first: waits for who used it before stand in front of the launch.
  std::vector<std::optional<nn::WgradTarget>> targets;
  for (const Written& w : written_) {
    targets.push_back(
        sink->begin_wgrad(unit_.parameters()[w.parameter].tensor));
  }
  const char* miss = miss_of_backward(grads, targets);
  const DrawAgain again(open.states);
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
