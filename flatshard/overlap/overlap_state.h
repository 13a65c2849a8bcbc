#pragma once

#include "flatshard/nn/detached.h"
#include "flatshard/overlap/overlap_runner.h"

#include <atomic>
#include <memory>
#include <vector>

// What an OverlapRunner keeps of a microbatch.
namespace flatshard {

/// Rows on their way; written on the exchange stream.
struct OverlapRunner::Transfer {
  nn::TensorList sent;  ///< those dispatched are held until they are received
  at::Tensor residual;  ///< held likewise
  nn::TensorList rows;
  std::atomic<bool> arrived = false;
};

/// One microbatch in one layer, from its first step to its last.
struct OverlapRunner::Layer {
  std::unique_ptr<nn::BlockNodes> nodes;
  at::Tensor input;
  nn::DetachedNode attend_node, shared_node, experts_node, merge_node;
  nn::BlockNodes::Attended attended;
  at::Tensor expert_rows;
  std::shared_ptr<Transfer> dispatched, combined;
  // Gradients.
  nn::TensorList merge_grads;  ///< of rows, residual
  at::Tensor shared_grad;
  nn::TensorList expert_grads;
  std::shared_ptr<Transfer> combine_grads, dispatch_grads;
};

struct OverlapRunner::Microbatch {
  std::unique_ptr<BackwardPass> pass;
  std::vector<Layer> layers;
  nn::DetachedNode embed, head;
  at::Tensor tokens;    ///< between blocks
  at::Tensor gradient;  ///< likewise
  int begun = -2;       ///< the last layer whose backward began; -1: the root
};

}  // namespace flatshard
