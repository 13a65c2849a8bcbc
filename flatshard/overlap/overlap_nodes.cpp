// The nodes of an OverlapRunner: what each step of a plan computes.
#include "flatshard/core/error.h"
#include "flatshard/nn/first_run.h"
#include "flatshard/overlap/overlap_runner.h"
#include "flatshard/overlap/overlap_state.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard {
namespace {

using NodeDirection = nn::TokenExchange::Direction;

// What a piece gives without a graph: the same tensors, and a gradient is
// wanted of each that can have one.
nn::TensorList run_without_graph(
    const nn::TensorList& inputs,
    const nn::DetachedNode::Body& body) {
  const at::NoGradGuard no_grad;
  const nn::FirstRun first_run;
  nn::TensorList out;
  for (const at::Tensor& output : body(inputs)) {
    at::Tensor leaf = output.defined() ? output.detach() : output;
    if (leaf.defined() && leaf.is_floating_point()) {
      leaf.set_requires_grad(true);
    }
    out.push_back(std::move(leaf));
  }
  return out;
}

}  // namespace

// -- forward -----------------------------------------------------------------

void OverlapRunner::attend(Layer& layer, bool with_graph) {
  const auto body = [&layer](const nn::TensorList& in) {
    const auto out = layer.nodes->attend(in[0]);
    nn::TensorList all{out.residual, out.shared};
    all.insert(all.end(), out.rows.begin(), out.rows.end());
    return all;
  };
  const nn::TensorList out =
      with_graph ? layer.attend_node.forward({layer.input}, body)
                 : run_without_graph({layer.input}, body);
  layer.attended = {
      .rows = {out.begin() + 2, out.end()},
      .residual = out[0],
      .shared = out[1]};
}

void OverlapRunner::shared(Layer& layer, bool with_graph) {
  const auto body = [&layer](const nn::TensorList& in) {
    return nn::TensorList{layer.nodes->shared_experts(in[0], in[1])};
  };
  const nn::TensorList in{
      std::exchange(layer.attended.shared, {}),
      std::exchange(layer.attended.residual, {})};
  layer.attended.residual =
      (with_graph ? layer.shared_node.forward(in, body)
                  : run_without_graph(in, body))[0];
}

void OverlapRunner::experts(Layer& layer, bool with_graph) {
  const auto body = [&layer](const nn::TensorList& in) {
    return nn::TensorList{layer.nodes->experts(in)};
  };
  const nn::TensorList& in = received(layer.dispatched);
  layer.expert_rows =
      (with_graph ? layer.experts_node.forward(in, body)
                  : run_without_graph(in, body))[0];
  layer.dispatched.reset();
}

void OverlapRunner::forward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  const bool with_graph = !options_.recompute;
  if (step.node == PlanNode::embed) {
    m.pass->forward_begin(model_.root);
    if (model_.ends) {
      m.pass->forward_begin(model_.ends->embed);
    }
    m.tokens = m.embed.forward({}, [&](const nn::TensorList&) {
      return nn::TensorList{model_.embed(step.microbatch)};
    })[0];
    if (model_.ends) {
      m.pass->forward_end(model_.ends->embed);
    }
    return;
  }
  if (step.node == PlanNode::head) {
    if (model_.ends) {
      m.pass->forward_begin(model_.ends->head);
    }
    const nn::TensorList out =
        m.head.forward({std::exchange(m.tokens, {})}, [&](const auto& in) {
          return nn::TensorList{model_.head(step.microbatch, in[0])};
        });
    losses_[step.microbatch] = out[0].detach();
    if (model_.ends) {
      m.pass->forward_end(model_.ends->head);
    }
    m.pass->forward_end(model_.root);
    return;
  }
  Layer& layer = layer_of(step);
  switch (step.node) {
    case PlanNode::attend:
      m.pass->forward_begin(unit_of(step));
      layer.nodes = model_.nodes(step.microbatch, step.layer);
      layer.input = std::exchange(m.tokens, {});
      attend(layer, with_graph);
      if (with_graph) {
        layer.input = at::Tensor();
      }
      if (is_dense(step.layer)) {
        m.tokens = std::exchange(layer.attended.residual, {});
        m.pass->forward_end(unit_of(step));
      }
      break;
    case PlanNode::dispatch:
      layer.nodes->finish_plan();
      layer.dispatched = send(
          layer,
          NodeDirection::dispatch,
          std::exchange(layer.attended.rows, {}));
      break;
    case PlanNode::shared:
      shared(layer, with_graph);
      break;
    case PlanNode::experts:
      experts(layer, with_graph);
      m.pass->forward_end(unit_of(step));
      break;
    case PlanNode::combine:
      layer.combined = send(
          layer,
          NodeDirection::combine,
          {std::exchange(layer.expert_rows, {})},
          layer.attended.residual);
      break;
    case PlanNode::merge:
      m.tokens = layer.merge_node.forward(
          {received(layer.combined)[0],
           std::exchange(layer.attended.residual, {})},
          [&layer](const nn::TensorList& in) {
            return nn::TensorList{layer.nodes->merge(in[0], in[1])};
          })[0];
      layer.combined.reset();
      break;
    default:
      break;
  }
}

// -- backward ----------------------------------------------------------------

void OverlapRunner::begin_backward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  if (step.node == PlanNode::head) {
    const bool is_last =
        step.microbatch + 1 == static_cast<int>(microbatches_.size());
    m.pass->open_backward(
        {.is_last = is_last, .interleaved = options_.interleave && !is_last});
  }
  // The root's begins with its head and ends with its embedding.
  if (step.node != PlanNode::embed && step.layer != m.begun) {
    m.begun = step.layer;
    m.pass->backward_begin(unit_of(step));
  }
  m.pass->set_delay_wgrad(
      options_.delay_wgrad && step.layer >= 0,
      static_cast<int>(step.node));
}

void OverlapRunner::recompute(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  Layer& layer = layer_of(step);
  switch (step.node) {
    case PlanNode::attend:
      if (step.layer != m.begun) {
        m.begun = step.layer;
        m.pass->backward_begin(unit_of(step));
      }
      m.pass->recompute_begin(unit_of(step));
      attend(layer, true);
      layer.input = at::Tensor();
      if (!layer.attended.shared.defined()) {
        layer.attended.residual = at::Tensor();
      }
      break;
    case PlanNode::dispatch:
      layer.dispatched = send(
          layer,
          NodeDirection::dispatch,
          std::exchange(layer.attended.rows, {}));
      break;
    case PlanNode::shared:
      shared(layer, true);
      layer.attended.residual = at::Tensor();
      break;
    case PlanNode::experts:
      experts(layer, true);
      layer.expert_rows = at::Tensor();
      break;
    default:
      break;
  }
  const PlanNode last =
      is_dense(step.layer) ? PlanNode::attend : PlanNode::experts;
  if (step.node == last) {
    m.pass->recompute_end(unit_of(step));
  }
}

void OverlapRunner::backward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  if (step.node == PlanNode::head) {
    if (model_.ends) {
      m.pass->backward_begin(model_.ends->head);
    }
    m.gradient = m.head.backward({at::ones_like(losses_[step.microbatch])})[0];
    if (model_.ends) {
      m.pass->backward_end(model_.ends->head);
    }
    return;
  }
  if (step.node == PlanNode::embed) {
    if (model_.ends) {
      m.pass->backward_begin(model_.ends->embed);
    }
    m.embed.backward({std::exchange(m.gradient, {})});
    if (model_.ends) {
      m.pass->backward_end(model_.ends->embed);
    }
    m.pass->backward_end(model_.root);
    m.pass->close_backward();
    microbatches_[step.microbatch].reset();
    return;
  }
  Layer& layer = layer_of(step);
  switch (step.node) {
    case PlanNode::merge:
      layer.merge_grads =
          layer.merge_node.backward({std::exchange(m.gradient, {})});
      break;
    case PlanNode::combine:
      layer.combine_grads = send(
          layer,
          NodeDirection::dispatch,
          {std::exchange(layer.merge_grads[0], {})});
      break;
    case PlanNode::shared: {
      nn::TensorList grads =
          layer.shared_node.backward({std::exchange(layer.merge_grads[1], {})});
      layer.shared_grad = std::move(grads[0]);
      layer.merge_grads[1] = std::move(grads[1]);
      break;
    }
    case PlanNode::experts:
      layer.expert_grads =
          layer.experts_node.backward({received(layer.combine_grads)[0]});
      layer.combine_grads.reset();
      break;
    case PlanNode::dispatch:
      layer.dispatch_grads = send(
          layer,
          NodeDirection::combine,
          std::exchange(layer.expert_grads, {}));
      break;
    case PlanNode::attend: {
      nn::TensorList grads{std::exchange(m.gradient, {}), at::Tensor()};
      if (!is_dense(step.layer)) {
        grads = {
            std::exchange(layer.merge_grads[1], {}),
            std::exchange(layer.shared_grad, {})};
        const nn::TensorList& rows = received(layer.dispatch_grads);
        grads.insert(grads.end(), rows.begin(), rows.end());
        layer.dispatch_grads.reset();
      }
      m.gradient = layer.attend_node.backward(grads)[0];
      m.pass->backward_end(unit_of(step));
      break;
    }
    default:
      break;
  }
}

}  // namespace flatshard
