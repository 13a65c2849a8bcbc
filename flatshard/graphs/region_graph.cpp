#include "flatshard/graphs/region_graph.h"

#include "flatshard/core/error.h"
#include "flatshard/graphs/static_tensor.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/ops/float8/known_amax.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using torch::autograd::variable_list;

// While an object exists, layers with these contexts use its sink and planes.
class ContextScope {
 public:
  /// @param sink, planes  null: as before.
  ContextScope(
      const std::vector<nn::ModuleContextPtr>& contexts,
      nn::WgradSink* sink,
      const std::shared_ptr<PlanePlaces>& planes)
      : contexts_(contexts) {
    if (sink != nullptr) {
      sink_ = std::shared_ptr<nn::WgradSink>(sink, [](nn::WgradSink*) {});
    }
    for (const nn::ModuleContextPtr& context : contexts_) {
      before_.push_back({context->wgrad_sink, context->weight_source});
      if (sink_ != nullptr) {
        context->wgrad_sink = sink_;
      }
      if (planes != nullptr) {
        context->weight_source = planes;
      }
    }
  }
  ~ContextScope() {
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      contexts_[i]->wgrad_sink = before_[i].sink;
      contexts_[i]->weight_source = before_[i].source;
    }
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  struct Before {
    std::weak_ptr<nn::WgradSink> sink;
    std::weak_ptr<nn::WeightSource> source;
  };

  const std::vector<nn::ModuleContextPtr>& contexts_;
  std::shared_ptr<nn::WgradSink> sink_;
  std::vector<Before> before_;
};

}  // namespace

// While it exists, parameters have the accumulators of the recorded graph. The
// unit's accumulators belong to the stream that made them, and a recording may
// not wait for another stream.
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

RegionGraph::RegionGraph(Unit& unit, Options options)
    : name_(std::move(options.name)),
      owner_(std::move(options.owner)),
      unit_(unit),
      runtime_(std::move(options.runtime)),
      uses_(std::move(options.uses)),
      with_grad_(options.with_grad),
      on_backward_(std::move(options.on_backward)) {
}

RegionGraph::~RegionGraph() = default;

std::vector<const void*> RegionGraph::parameter_addresses() const {
  std::vector<const void*> addresses;
  for (const UnitParameter& p : unit_.parameters()) {
    addresses.push_back(
        p.storage.has_values() ? p.tensor.const_data_ptr() : nullptr);
  }
  return addresses;
}

nn::TensorList RegionGraph::run_forward() {
  // With recompute the backward runs the region again, so nothing is kept in
  // between.
  const at::AutoGradMode grad_mode(with_grad_ && !call_.recompute);
  const nn::SecondRun second(call_.in_second_run && !call_.recompute);
  const ParameterScope parameters(*this);
  const ContextScope layers(owner_.contexts, nullptr, forward_planes_);
  kept_.begin_first_run();
  const nn::KeptTensors::Scope keep(
      call_.recompute && call_.keep_attention ? &kept_ : nullptr);
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

void RegionGraph::capture_forward(
    GraphPool& pool,
    std::shared_ptr<PlanePlaces> planes) {
  drop();
  FLATSHARD_CHECK(
      planes == nullptr || !call_.recompute,
      usage,
      "{}: a recomputed region has FP8 weights, and a replay would request "
      "them at other times than eager steps",
      name_);
  forward_planes_ = std::move(planes);
  for (const Input& input : call_.inputs) {
    const std::size_t i = inputs_.size();
    const bool chained = input.source && input.source->captured_ &&
                         input.source_output < input.source->outputs_.size() &&
                         !copied_inputs_.contains(i);
    at::Tensor memory =
        chained ? input.source->outputs_[input.source_output].variable_data()
                : at::empty_strided(input.sizes, input.strides, input.options);
    if (!chained && !memory.is_floating_point()) {
      without_repeats(memory).zero_();  // indices: a CPU capture reads them
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
    // A program in another language may request the gradient of any output.
    FLATSHARD_CHECK(
        outputs_[i].is_floating_point() ||
            (owner_.module != nullptr && is_constant_[i]),
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
      live_.clear();  // the accumulators have owners by then
    }
  });
  const ContextScope layers(owner_.contexts, &sink, nullptr);
  const ParameterScope parameters(*this);
  if (call_.recompute) {
    const at::AutoGradMode grad_mode(true);
    const nn::SecondRun second;
    kept_.begin_second_run();
    const nn::KeptTensors::Scope keep(call_.keep_attention ? &kept_ : nullptr);
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
    TargetSink& targets,
    std::shared_ptr<PlanePlaces> planes) {
  backward_planes_ = std::move(planes);
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const Consumer& consumer = consumers[i];
    const bool chained =
        consumer.region && consumer.region->backward_ &&
        consumer.region->backward_->outputs()[consumer.input].defined() &&
        !copied_grads_.contains(i);
    grad_outputs_.push_back(
        chained ? consumer.region->backward_->outputs()[consumer.input]
                : at::empty_like(outputs_[i]));
    chained_grads_.emplace_back();
    if (chained) {
      chained_grads_.back() = consumer.region;
    }
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

GraphAudit RegionGraph::audit(const TargetSink& targets) const {
  nn::TensorList declared = inputs_;
  declared.insert(declared.end(), outputs_.begin(), outputs_.end());
  declared.insert(declared.end(), grad_outputs_.begin(), grad_outputs_.end());
  const nn::TensorList& constants = call_.constants;
  declared.insert(declared.end(), constants.begin(), constants.end());
  for (const UnitParameter& p : unit_.parameters()) {
    if (p.storage.has_values()) {
      declared.push_back(p.tensor);
    }
    if (backward_) {
      declared.push_back(targets.place(p.tensor));
    }
  }
  if (const auto& planes = backward_ ? backward_planes_ : forward_planes_) {
    declared.insert(
        declared.end(),
        planes->memory().begin(),
        planes->memory().end());
  }
  return (backward_ ? backward_ : forward_)->audit(declared);
}

nn::TensorList RegionGraph::grads_of_inputs(TargetSink& sink) {
  // An amax that another region found of a gradient is not part of this graph.
  nn::forget_known_amax();
  const auto forget = c10::make_scope_exit([] { nn::forget_known_amax(); });
  const ContextScope layers(owner_.contexts, nullptr, backward_planes_);
  nn::TensorList out = differentiate(grad_outputs_, sink);
  for (std::size_t i = 0; i < out.size(); ++i) {
    FLATSHARD_CHECK(
        i < inputs_.size() || !out[i].defined(),
        usage,
        "{}: parameter {} has no place in the unit's gradient slot",
        name_,
        i - inputs_.size());
    // The producer of a gradient may write it again before this one is read.
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
  kept_.begin_first_run();
  inputs_.clear();
  chained_.clear();
  outputs_.clear();
  aliased_input_.clear();
  is_constant_.clear();
  grad_outputs_.clear();
  chained_grads_.clear();
  accumulators_.clear();
  written_.clear();
  forward_planes_.reset();
  backward_planes_.reset();
}

}  // namespace flatshard
