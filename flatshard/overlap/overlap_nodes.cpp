// The nodes of an OverlapRunner: what each step of a plan computes.
#include "flatshard/core/error.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/overlap/overlap_runner.h"
#include "flatshard/overlap/overlap_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// The last of the nodes that a plan runs again. A backward needs the input rows
// of the experts' last matmul, and nothing after it.
constexpr PlanNode kLastRecomputed = PlanNode::experts;

// Runs a piece without a graph. Its results are the same tensors, and each of
// them that can have a gradient requires one.
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

// -- pieces ------------------------------------------------------------------

void OverlapRunner::run_stage(
    Layer& layer,
    PlanNode node,
    PlanPass pass,
    bool with_graph) {
  const BlockStages::Stage& stage = layer.stages.of(node);
  if (stage.nodes.empty()) {
    return;
  }
  nn::TensorList inputs;
  for (const int value : stage.inputs) {
    receive_rows(layer, value);
    inputs.push_back(layer.values[value]);
  }
  const bool is_forward = pass == PlanPass::forward;
  const auto release = [&](int value) {
    const BlockStages& stages = layer.stages;
    const bool is_read = stages.is_read(
        value,
        node,
        is_forward ? PlanNode::merge : kLastRecomputed);
    const bool is_run_again =
        is_forward && options_.recompute &&
        std::ranges::count(stages.of(PlanNode::attend).inputs, value) > 0;
    if (!is_read && !is_run_again &&
        !(is_forward && value == stages.result())) {
      layer.values[value] = at::Tensor();
    }
  };
  if (stream_of(node) == PlanStream::exchange) {
    const nn::Node& exchange = layer.nodes.list()[stage.nodes.front()];
    const nn::RowRoute route = exchange.route();
    layer.rows[node] = send(
        layer,
        route,
        route.direction,
        inputs,
        exchange.addend < 0 ? at::Tensor() : layer.values[exchange.addend]);
    if (exchange.addend >= 0) {
      release(exchange.addend);
    }
  } else {
    const auto body = [&layer, &stage](const nn::TensorList& in) {
      nn::TensorList values(layer.nodes.num_values());
      for (std::size_t i = 0; i < in.size(); ++i) {
        values[stage.inputs[i]] = in[i];
      }
      layer.nodes.run(stage.nodes, stage.outputs, values);
      nn::TensorList outputs;
      for (const int value : stage.outputs) {
        outputs.push_back(std::move(values[value]));
      }
      return outputs;
    };
    nn::TensorList outputs = with_graph
                                 ? layer.graphs[node].forward(inputs, body)
                                 : run_without_graph(inputs, body);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      layer.values[stage.outputs[i]] = std::move(outputs[i]);
    }
  }
  for (const int value : stage.inputs) {
    release(value);
  }
  for (const int value : stage.outputs) {
    release(value);
  }
}

void OverlapRunner::run_stage_backward(Layer& layer, PlanNode node) {
  const BlockStages::Stage& stage = layer.stages.of(node);
  if (stage.nodes.empty()) {
    return;
  }
  nn::TensorList gradients;
  for (const int value : stage.outputs) {
    receive_gradients(layer, value);
    gradients.push_back(std::exchange(layer.gradients[value], {}));
  }
  if (stream_of(node) == PlanStream::exchange) {
    const nn::RowRoute route = layer.nodes.list()[stage.nodes.front()].route();
    layer.row_gradients[node] =
        send(layer, route, nn::back(route.direction), gradients);
    return;
  }
  const nn::TensorList of_inputs = layer.graphs[node].backward(gradients);
  for (std::size_t i = 0; i < of_inputs.size(); ++i) {
    add_gradient(layer, stage.inputs[i], of_inputs[i]);
  }
}

void OverlapRunner::add_gradient(
    Layer& layer,
    int value,
    const at::Tensor& gradient) {
  if (!gradient.defined()) {
    return;
  }
  at::Tensor& sum = layer.gradients[value];
  sum = sum.defined() ? sum + gradient : gradient;
  const int maker = layer.nodes.maker_of(value);
  if (maker >= 0 && layer.nodes.list()[maker].addend >= 0) {
    add_gradient(layer, layer.nodes.list()[maker].addend, gradient);
  }
}

void OverlapRunner::receive_rows(Layer& layer, int value) {
  for (auto& [exchange, transfer] : layer.rows) {
    const auto& outputs = layer.stages.of(exchange).outputs;
    if (transfer.rows && std::ranges::find(outputs, value) != outputs.end()) {
      nn::TensorList rows = transfer.receive();
      for (std::size_t i = 0; i < rows.size(); ++i) {
        layer.values[outputs[i]] = std::move(rows[i]);
      }
    }
  }
}

void OverlapRunner::receive_gradients(Layer& layer, int value) {
  for (auto& [exchange, transfer] : layer.row_gradients) {
    const auto& inputs = layer.stages.of(exchange).inputs;
    if (transfer.rows && std::ranges::find(inputs, value) != inputs.end()) {
      const nn::TensorList rows = transfer.receive();
      for (std::size_t i = 0; i < rows.size(); ++i) {
        add_gradient(layer, inputs[i], rows[i]);
      }
    }
  }
}

// -- forward -----------------------------------------------------------------

void OverlapRunner::at_end(
    const PlanStep& step,
    const std::function<void(UnitId)>& call) {
  if (model_.ends) {
    call(step.node == PlanNode::head ? model_.ends->head : model_.ends->embed);
  }
}

void OverlapRunner::end_forward(const PlanStep& step, UnitId unit) {
  const auto num = static_cast<int>(microbatches_.size());
  microbatches_[step.microbatch]->pass->forward_end(
      unit,
      /*more_follow=*/is_first_of_pair(step.microbatch, num, options_));
}

void OverlapRunner::forward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  if (step.node == PlanNode::embed) {
    m.pass->forward_begin(model_.root);
    at_end(step, [&](UnitId unit) { m.pass->forward_begin(unit); });
    m.tokens = m.embed.forward({}, [&](const nn::TensorList&) {
      return nn::TensorList{model_.embed(step.microbatch)};
    })[0];
    at_end(step, [&](UnitId unit) { end_forward(step, unit); });
    return;
  }
  if (step.node == PlanNode::head) {
    at_end(step, [&](UnitId unit) { m.pass->forward_begin(unit); });
    const nn::TensorList out =
        m.head.forward({std::exchange(m.tokens, {})}, [&](const auto& in) {
          return nn::TensorList{model_.head(step.microbatch, in[0])};
        });
    losses_[step.microbatch] = out[0].detach();
    at_end(step, [&](UnitId unit) { end_forward(step, unit); });
    end_forward(step, model_.root);
    return;
  }
  if (step.node == PlanNode::attend) {
    begin_layer(step);
    run_stage(layer_of(step), BlockStages::kKept, step.pass, true);
  }
  // Stages that no recompute runs again have their graph from here on.
  run_stage(
      layer_of(step),
      step.node,
      step.pass,
      !options_.recompute || step.node == PlanNode::merge);
  if (step.node == graph_of(step).last_with_weights()) {
    end_forward(step, unit_of(step));
  }
  if (step.node == graph_of(step).result()) {
    Layer& layer = layer_of(step);
    receive_rows(layer, layer.stages.result());
    m.tokens = std::exchange(layer.values[layer.stages.result()], {});
  }
}

void OverlapRunner::begin_layer(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  m.pass->forward_begin(unit_of(step));
  auto& layer = m.layers[step.layer];
  layer.emplace(model_.nodes(step.microbatch, step.layer));
  layer->values[0] = std::exchange(m.tokens, {});
  for (const PlanNode node : {PlanNode::dispatch, PlanNode::shared}) {
    const bool is_planned = graph_of(step).has(node);
    FLATSHARD_CHECK(
        layer->stages.has(node) == is_planned,
        usage,
        "the nodes of layer {}: expected {} node for the plan's {}, got {}; "
        "see OverlapPlanOptions::dense and shared_experts",
        step.layer,
        is_planned ? "a" : "no",
        to_string(node),
        is_planned ? "none" : "one");
  }
}

// -- backward ----------------------------------------------------------------

void OverlapRunner::begin_backward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  if (step.node == PlanNode::head) {
    const bool is_last =
        step.microbatch + 1 == static_cast<int>(microbatches_.size());
    m.pass->open_backward(
        {.is_last = is_last,
         .interleaved = options_.in_flight > 1 && !is_last});
  }
  // The root's backward starts with its head and ends with its embedding.
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
  if (step.node == PlanNode::attend) {
    m.pass->recompute_begin(unit_of(step));
  }
  const nn::SecondRun second;
  run_stage(layer_of(step), step.node, step.pass, /*with_graph=*/true);
  if (step.node == graph_of(step).last_with_weights()) {
    m.pass->recompute_end(unit_of(step));
  }
}

void OverlapRunner::backward(const PlanStep& step) {
  Microbatch& m = *microbatches_[step.microbatch];
  if (step.node == PlanNode::head) {
    at_end(step, [&](UnitId unit) { m.pass->backward_begin(unit); });
    m.gradient = m.head.backward({at::ones_like(losses_[step.microbatch])})[0];
    at_end(step, [&](UnitId unit) { m.pass->backward_end(unit); });
    return;
  }
  if (step.node == PlanNode::embed) {
    at_end(step, [&](UnitId unit) { m.pass->backward_begin(unit); });
    m.embed.backward({std::exchange(m.gradient, {})});
    at_end(step, [&](UnitId unit) { m.pass->backward_end(unit); });
    m.pass->backward_end(model_.root);
    m.pass->close_backward();
    microbatches_[step.microbatch].reset();
    return;
  }
  Layer& layer = layer_of(step);
  if (step.node == graph_of(step).result()) {
    add_gradient(layer, layer.stages.result(), std::exchange(m.gradient, {}));
  }
  run_stage_backward(layer, step.node);
  if (step.node == PlanNode::attend) {
    run_stage_backward(layer, BlockStages::kKept);
    m.gradient = std::exchange(layer.gradients[0], {});
    m.pass->backward_end(unit_of(step));
  }
}

}  // namespace flatshard
