#pragma once

#include "flatshard/nn/detached.h"
#include "flatshard/overlap/block_stages.h"
#include "flatshard/overlap/overlap_runner.h"

#include <map>
#include <memory>
#include <optional>
#include <vector>

// The state that an OverlapRunner keeps of a microbatch.
namespace flatshard {

/// Rows on their way.
struct OverlapRunner::Transfer {
  std::unique_ptr<nn::RowTransfer> rows;  ///< null: received
  std::vector<bool> wanted;               ///< their gradients

  nn::TensorList receive();
};

/// One microbatch in one layer, from its first step to its last.
struct OverlapRunner::Layer {
  explicit Layer(nn::Nodes of_call)
      : nodes(std::move(of_call)),
        stages(nodes),
        values(nodes.num_values()),
        gradients(nodes.num_values()) {}

  nn::Nodes nodes;
  BlockStages stages;
  std::map<PlanNode, nn::DetachedNode> graphs;
  // The index is the number of the tensor.
  nn::TensorList values;
  nn::TensorList gradients;
  /// The key is an exchange: its rows in this pass, until they are read.
  std::map<PlanNode, Transfer> rows, row_gradients;
  Event made;  ///< after its last step of compute
};

struct OverlapRunner::Microbatch {
  std::unique_ptr<BackwardPass> pass;
  std::vector<std::optional<Layer>> layers;
  nn::DetachedNode embed, head;
  at::Tensor tokens;    ///< between blocks
  at::Tensor gradient;  ///< likewise
  int begun = -2;       ///< last layer whose backward started; -1: the root
};

}  // namespace flatshard
