#pragma once

#include "flatshard/moe/nodes.h"
#include "flatshard/schedule/overlap_plan.h"

#include <array>
#include <vector>

namespace flatshard {

/// The nodes of a block by the node of an OverlapPlan that runs them. Nodes
/// that the dispatch depends on are `attend`. Other nodes that depend on
/// neither exchange are `shared`, on one of them `experts`, on both `merge`. A
/// block without an exchange has only `attend`. Nodes that a recompute keeps
/// are separate, and run with `attend`.
class BlockStages {
 public:
  static constexpr PlanNode kKept = PlanNode::embed;  ///< no block has that

  struct Stage {
    std::vector<int> nodes;
    std::vector<int> inputs;   ///< tensors that are made outside
    std::vector<int> outputs;  ///< tensors that are read outside, or the result
  };

  /// @throws Error{usage} unless there are zero exchanges or two, and the
  ///   second one depends on the rows of the first.
  explicit BlockStages(const nn::Nodes& nodes);

  const Stage& of(PlanNode node) const { return stages_[index(node)]; }
  bool has(PlanNode node) const { return !of(node).nodes.empty(); }
  /// Returns the number of the block's result.
  int result() const { return result_; }
  /// Returns whether a stage in (after, up_to] reads the tensor.
  bool is_read(int value, PlanNode after, PlanNode up_to) const;

 private:
  static std::size_t index(PlanNode node) {
    return static_cast<std::size_t>(node);
  }

  std::array<Stage, static_cast<std::size_t>(PlanNode::head) + 1> stages_;
  std::vector<std::vector<PlanNode>> readers_;  ///< by tensor
  int result_ = 0;
};

}  // namespace flatshard
