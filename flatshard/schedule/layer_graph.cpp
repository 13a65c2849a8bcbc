#include "flatshard/schedule/layer_graph.h"

#include <algorithm>

namespace flatshard {

LayerGraph::LayerGraph(bool has_experts, bool has_shared) {
  nodes_.push_back({PlanNode::attend, true});
  if (!has_experts) {
    return;
  }
  nodes_.push_back({PlanNode::dispatch, false, {PlanNode::attend}});
  if (has_shared) {
    nodes_.push_back({PlanNode::shared, true, {PlanNode::attend}});
  }
  nodes_.push_back({PlanNode::experts, true, {PlanNode::dispatch}});
  nodes_.push_back({PlanNode::combine, false, {PlanNode::experts}});
  nodes_.push_back({PlanNode::merge, false, {PlanNode::combine}});
  if (has_shared) {
    nodes_.back().reads.push_back(PlanNode::shared);
  }
}

const LayerNode& LayerGraph::of(PlanNode node) const {
  return *std::ranges::find(nodes_, node, &LayerNode::node);
}

std::vector<PlanNode> LayerGraph::readers_of(PlanNode node) const {
  std::vector<PlanNode> readers;
  for (const LayerNode& reader : nodes_) {
    if (std::ranges::count(reader.reads, node) > 0) {
      readers.push_back(reader.node);
    }
  }
  return readers;
}

bool LayerGraph::is_recomputed(PlanNode node) const {
  return of(node).has_weights ||
         std::ranges::any_of(readers_of(node), [&](PlanNode reader) {
           return is_recomputed(reader);
         });
}

PlanNode LayerGraph::last_with_weights() const {
  return std::ranges::find_if(
             nodes_.rbegin(),
             nodes_.rend(),
             &LayerNode::has_weights)
      ->node;
}

const LayerGraph& layer_graph(const OverlapPlanOptions& options, int layer) {
  static const LayerGraph dense(false, false);
  static const LayerGraph experts(true, false);
  static const LayerGraph with_shared(true, true);
  if (!options.dense.empty() && options.dense[layer]) {
    return dense;
  }
  return options.shared_experts ? with_shared : experts;
}

std::vector<PlanStep>
plan_steps(int layers, int microbatches, const OverlapPlanOptions& options) {
  std::vector<PlanStep> steps;
  for (int m = 0; m < microbatches; ++m) {
    for (const PlanNode node : {PlanNode::embed, PlanNode::head}) {
      steps.push_back({PlanPass::forward, m, -1, node});
      steps.push_back({PlanPass::backward, m, -1, node});
    }
    for (int l = 0; l < layers; ++l) {
      const LayerGraph& graph = layer_graph(options, l);
      for (const LayerNode& of : graph.nodes()) {
        steps.push_back({PlanPass::forward, m, l, of.node});
        steps.push_back({PlanPass::backward, m, l, of.node});
        if (options.recomputes(l) && graph.is_recomputed(of.node)) {
          steps.push_back({PlanPass::recompute, m, l, of.node});
        }
        if (options.delay_wgrad && of.has_weights) {
          steps.push_back({PlanPass::wgrad, m, l, of.node});
        }
      }
    }
  }
  return steps;
}

std::vector<PlanStep> plan_dependencies(
    const PlanStep& step,
    int layers,
    const OverlapPlanOptions& options) {
  std::vector<PlanStep> earlier;
  const auto need = [&](PlanPass pass, int layer, PlanNode node) {
    earlier.push_back({pass, step.microbatch, layer, node});
  };
  const auto need_tokens = [&](int layer) {
    need(
        PlanPass::forward,
        layer,
        layer < 0 ? PlanNode::embed : layer_graph(options, layer).result());
  };
  const bool is_forward = step.pass == PlanPass::forward;
  const int l = step.layer;
  if (step.node == PlanNode::head) {
    is_forward ? need_tokens(layers - 1)
               : need(PlanPass::forward, -1, PlanNode::head);
    return earlier;
  }
  if (step.node == PlanNode::embed) {
    if (is_forward) {
      return earlier;
    }
    // It ends the microbatch: no gradient follows it.
    need(PlanPass::backward, 0, PlanNode::attend);
    for (int layer = 0; options.delay_wgrad && layer < layers; ++layer) {
      for (const LayerNode& of : layer_graph(options, layer).nodes()) {
        if (of.has_weights) {
          need(PlanPass::wgrad, layer, of.node);
        }
      }
    }
    return earlier;
  }
  // A node runs after the nodes that it reads, its backward after its readers'
  // backwards.
  const LayerGraph& graph = layer_graph(options, l);
  const LayerNode& of = graph.of(step.node);
  switch (step.pass) {
    case PlanPass::forward:
    case PlanPass::recompute:
      if (of.reads.empty()) {
        is_forward ? need_tokens(l - 1)
                   : need(PlanPass::backward, -1, PlanNode::head);
      }
      for (const PlanNode node : of.reads) {
        need(step.pass, l, node);
      }
      break;
    case PlanPass::backward:
      if (options.recomputes(step.layer) && of.has_weights) {
        need(PlanPass::recompute, l, step.node);
      }
      for (const PlanNode reader : graph.readers_of(step.node)) {
        need(PlanPass::backward, l, reader);
      }
      if (step.node == graph.result()) {
        l + 1 < layers ? need(PlanPass::backward, l + 1, PlanNode::attend)
                       : need(PlanPass::backward, -1, PlanNode::head);
      }
      break;
    case PlanPass::wgrad:
      need(PlanPass::backward, l, step.node);
      break;
  }
  return earlier;
}

}  // namespace flatshard
