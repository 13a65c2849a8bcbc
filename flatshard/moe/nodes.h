#pragma once

#include "flatshard/moe/token_exchange.h"
#include "flatshard/nn/module.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace flatshard::nn {

/// A piece of a block. Tensors between pieces are numbered; see Nodes.
struct Node {
  using Body = std::function<TensorList(const TensorList& inputs)>;

  std::string name;
  std::vector<int> inputs;
  std::vector<int> outputs;
  /// Modules whose weights `body` reads.
  std::vector<const Module*> reads;
  Body body;  ///< null: the node exchanges its inputs with other ranks
  /// The route of an exchange. The exchange starts once this can be called,
  /// because it returns the decision of an earlier node.
  std::function<RowRoute()> route;
  int addend = -1;  ///< see Nodes::exchange
  bool is_result_of_part = false;
  /// A recomputed block saves the results of this node. Nodes before it are
  /// saved as well.
  bool is_kept = false;

  bool is_exchange() const { return body == nullptr; }
};

/// One call of a block as a list of nodes. An ordinary forward, a recompute and
/// a schedule of several microbatches (OverlapRunner) run the block from it.
///
///     nn::Nodes nodes;  // the block's input is number 0
///     const auto routed = nodes.add("router", {0}, 2, {router.get()}, ...);
///     const auto rows = nodes.exchange("dispatch", routed, leave);
///     const auto out = nodes.add("experts", rows, 1, {experts.get()}, ...);
///     nodes.exchange("combine", out, come_back, /*addend=*/0);
///     return nodes.run({x})[0];
///
/// Bodies share what one call decides, e.g. its routing, and run again where a
/// block is recomputed. Then they do not decide again.
///
/// Gradients of a tensor that nodes of several steps of a schedule read are
/// added in the order of these steps, the last first. With three or more of
/// them rounding may differ from an ordinary backward.
class Nodes {
 public:
  explicit Nodes(int num_inputs = 1) : num_values_(num_inputs) {}

  /// Adds a node that computes. @return  the numbers of its outputs.
  std::vector<int> add(
      std::string name,
      std::vector<int> inputs,
      int num_outputs,
      std::vector<const Module*> reads,
      Node::Body body);
  /// Adds a node that exchanges rows: an output for each input.
  /// @param addend  number of a tensor that is added to the received rows, as
  ///   TransferInput::addend. Its gradient is the gradient of the sum. -1:
  ///   none.
  /// @param is_result_of_part  of the recomputed part around these nodes: a
  ///   second run sends nothing (see exchange_rows).
  std::vector<int> exchange(
      std::string name,
      std::vector<int> inputs,
      std::function<RowRoute()> route,
      int addend = -1,
      bool is_result_of_part = false);
  /// Marks the node that was added last; see Node::is_kept.
  void keep_last() { list_.back().is_kept = true; }
  /// Keeps state alive that bodies refer to.
  void keep(std::shared_ptr<void> state) { kept_.push_back(std::move(state)); }

  /// Runs all nodes in their order, in one graph.
  /// @return  the outputs of the last one.
  TensorList run(TensorList inputs) const;
  /// Runs some nodes in their order.
  /// @param values  input values, by number. The nodes' results are added, and
  ///   values that no node of `which` still reads are dropped, unless they are
  ///   in `wanted`.
  void run(
      const std::vector<int>& which,
      const std::vector<int>& wanted,
      TensorList& values) const;

  const std::vector<Node>& list() const { return list_; }
  int num_values() const { return num_values_; }
  /// Returns the node that makes value `value`; -1: it is an input.
  int maker_of(int value) const;

 private:
  std::vector<int> append(Node node, int num_outputs);

  int num_values_;
  std::vector<Node> list_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace flatshard::nn
