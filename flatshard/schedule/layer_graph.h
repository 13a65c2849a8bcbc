#pragma once

#include "flatshard/schedule/overlap_plan.h"

#include <algorithm>
#include <vector>

namespace flatshard {

struct LayerNode {
  PlanNode node{};
  bool has_weights = false;
  std::vector<PlanNode> reads = {};  ///< results of these; none: the tokens
};

/// The nodes of one layer, in the order of its forward. The steps of all
/// passes, what each depends on, and where the forward of a unit ends follow
/// from their edges.
class LayerGraph {
 public:
  LayerGraph(bool has_experts, bool has_shared);

  const std::vector<LayerNode>& nodes() const { return nodes_; }
  const LayerNode& of(PlanNode node) const;
  bool has(PlanNode node) const {
    return std::ranges::count(nodes_, node, &LayerNode::node) > 0;
  }
  std::vector<PlanNode> readers_of(PlanNode node) const;
  /// Returns whether a node with weights is it or depends on it.
  bool is_recomputed(PlanNode node) const;
  /// Returns the node with the layer's output: no node reads its result.
  PlanNode result() const { return nodes_.back().node; }
  /// Returns the last one with weights.
  PlanNode last_with_weights() const;

 private:
  std::vector<LayerNode> nodes_;
};

const LayerGraph& layer_graph(const OverlapPlanOptions& options, int layer);

/// Returns every step that a plan has, in no order of use.
std::vector<PlanStep>
plan_steps(int layers, int microbatches, const OverlapPlanOptions& options);

}  // namespace flatshard
