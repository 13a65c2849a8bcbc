#include "flatshard/nn/detached.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace flatshard::nn {

// The identity. The autograd graph ends at it.
struct DetachedNode::CutFunction : torch::autograd::Function<CutFunction> {
  // An output needs a gradient because `start` does.
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx,
      const at::Tensor& /*start*/,
      const at::Tensor& input,
      const c10::intrusive_ptr<Arrival>& arrival) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["arrival"] = c10::IValue::make_capsule(arrival);
    return input.variable_data();
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto capsule = ctx->saved_data["arrival"].toCapsule();
    static_cast<Arrival&>(*capsule).gradient = std::move(grads[0]);
    return {{}, {}, {}};
  }
};

TensorList DetachedNode::forward(const TensorList& inputs, const Body& body) {
  drop();
  const at::AutoGradMode with_grad(true);
  TensorList cut;
  cut.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    const bool wanted = input.defined() && input.requires_grad();
    arrivals_.push_back(wanted ? c10::make_intrusive<Arrival>() : nullptr);
    if (wanted) {
      const at::Tensor start = at::empty({0}, input.options());
      cut.push_back(CutFunction::apply(
          start.set_requires_grad(true),
          input.detach(),
          arrivals_.back()));
    } else {
      cut.push_back(input.defined() ? input.detach() : input);
    }
  }
  TensorList outputs = body(cut);
  has_graph_ = true;
  TensorList out;
  out.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    const bool has_gradient = output.defined() && output.requires_grad();
    outputs_.push_back(
        has_gradient ? torch::autograd::impl::gradient_edge(output)
                     : torch::autograd::Edge());
    at::Tensor leaf = output.defined() ? output.detach() : output;
    if (has_gradient) {
      leaf.set_requires_grad(true);
    }
    out.push_back(std::move(leaf));
  }
  return out;
}

TensorList DetachedNode::backward(const TensorList& gradients) {
  FLATSHARD_CHECK(
      has_graph_,
      usage,
      "the backward of a detached node: expected a forward before it, but "
      "there was no forward since the last backward");
  FLATSHARD_CHECK(
      gradients.size() == outputs_.size(),
      usage,
      "the backward of a detached node: expected {} gradients, one per output, "
      "got {}",
      outputs_.size(),
      gradients.size());
  const auto arrivals = std::exchange(arrivals_, {});
  const auto outputs = std::exchange(outputs_, {});
  has_graph_ = false;
  torch::autograd::edge_list roots;
  TensorList root_grads;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (gradients[i].defined() && outputs[i].is_valid()) {
      roots.push_back(outputs[i]);
      root_grads.push_back(gradients[i]);
    }
  }
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        roots,
        root_grads,
        /*keep_graph=*/false,
        /*create_graph=*/false,
        /*accumulate_grad=*/true);
  }
  TensorList out;
  out.reserve(arrivals.size());
  for (const auto& arrival : arrivals) {
    out.push_back(arrival ? std::move(arrival->gradient) : at::Tensor());
  }
  return out;
}

void DetachedNode::drop() {
  arrivals_.clear();
  outputs_.clear();
  has_graph_ = false;
}

}  // namespace flatshard::nn
