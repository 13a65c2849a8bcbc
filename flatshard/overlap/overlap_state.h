#pragma once

#include "flatshard/nn/detached.h"
#include "flatshard/overlap/block_stages.h"
#include "flatshard/overlap/overlap_runner.h"

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <vector>

// What an OverlapRunner keeps of a microbatch.
namespace flatshard {

/// Rows on their way; written on the exchange stream.
struct OverlapRunner::Transfer {
  nn::TensorList sent;  ///< those dispatched are held until they are received
  at::Tensor addend;    ///< held likewise
  nn::TensorList rows;
  std::atomic<bool> arrived = false;
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
  // By number of the tensor.
  nn::TensorList values;
  nn::TensorList gradients;
  /// By exchange: what it sends in this pass, until it is read.
  std::map<PlanNode, std::shared_ptr<Transfer>> rows, row_gradients;
};

struct OverlapRunner::Microbatch {
  std::unique_ptr<BackwardPass> pass;
  std::vector<std::optional<Layer>> layers;
  nn::DetachedNode embed, head;
  at::Tensor tokens;    ///< between blocks
  at::Tensor gradient;  ///< likewise
  int begun = -2;       ///< the last layer whose backward began; -1: the root
};

}  // namespace flatshard
