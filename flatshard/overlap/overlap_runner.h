#pragma once

#include "flatshard/moe/nodes.h"
#include "flatshard/overlap/backward_pass.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/schedule/layer_graph.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/schedule/overlap_plan.h"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace flatshard {

/// A model as an OverlapPlan runs it: blocks in pieces, each block a unit, and
/// the modules before and after them. No function may call a unit through its
/// holder, because that would be another forward of the unit.
struct OverlapModel {
  UnitId root = 0;
  /// Whether embedding and head are units. Unset: they belong to the root, so
  /// they stay unsharded from a step's first microbatch to its last.
  std::optional<PlanUnits::Ends> ends;
  std::vector<UnitId> layers;
  /// -> the input of the first block.
  std::function<at::Tensor(int microbatch)> embed;
  /// One call of a block, with one input and one result; called once per
  /// microbatch. See BlockStages for the supported nodes.
  std::function<nn::Nodes(int microbatch, int layer)> nodes;
  /// -> [] the loss to be differentiated: scaled, if microbatches are averaged.
  std::function<at::Tensor(int microbatch, const at::Tensor& tokens)> head;
};

/// Runs steps by an OverlapPlan: the backward of one microbatch in parallel
/// with the forward of the next, and exchanges of rows in parallel with both.
/// An exchange waits for the stage that made its rows (TransferInput::after),
/// and a stage for the rows that it reads.
///
/// Losses and gradients are bitwise equal to the plan's without interleaving
/// and without delayed weight gradients. The actions of the Runtime equal the
/// result of `plan_events` in a Scheduler with three gradient slots.
///
/// After an exception nothing of the step is left: the next one is right if the
/// exception came on all ranks.
class OverlapRunner {
 public:
  /// Lays out the runtime's slots for the plan. Between two steps.
  /// @throws Error{config} for options that do not fit each other.
  OverlapRunner(
      std::shared_ptr<Runtime> runtime,
      OverlapModel model,
      int microbatches,
      const OverlapPlanOptions& options);
  ~OverlapRunner();

  /// Forward and backward of all microbatches.
  /// @return  their losses, as the head gave them.
  std::vector<at::Tensor> run();

  const std::vector<PlanStep>& plan() const { return plan_; }

 private:
  struct Transfer;
  struct Layer;
  struct Microbatch;

  void run_step(const PlanStep& step);
  void forward(const PlanStep& step);
  void recompute(const PlanStep& step);
  void backward(const PlanStep& step);
  /// Calls it with the unit of an embed or a head, where it is a unit.
  void at_end(const PlanStep& step, const std::function<void(UnitId)>& call);
  /// Ends the unit's forward in the step's microbatch.
  void end_forward(const PlanStep& step, UnitId unit);
  void begin_layer(const PlanStep& step);
  /// The nodes of a forward or a recompute.
  void run_stage(Layer& layer, PlanNode node, PlanPass pass, bool with_graph);
  void run_stage_backward(Layer& layer, PlanNode node);
  static void add_gradient(Layer& layer, int value, const at::Tensor& gradient);
  /// If an exchange produces the tensor, or its gradient: receives the rows.
  void receive_rows(Layer& layer, int value);
  void receive_gradients(Layer& layer, int value);
  void begin_backward(const PlanStep& step);
  static Transfer send(
      const Layer& layer,
      const nn::RowRoute& route,
      nn::TokenExchange::Direction direction,
      const nn::TensorList& rows,
      const at::Tensor& addend = {});
  const LayerGraph& graph_of(const PlanStep& step) const {
    return layer_graph(options_, step.layer);
  }
  UnitId unit_of(const PlanStep& step) const;
  Layer& layer_of(const PlanStep& step);

  const std::shared_ptr<Runtime> runtime_;
  const OverlapModel model_;
  const OverlapPlanOptions options_;
  const std::vector<PlanStep> plan_;
  std::shared_ptr<void> interleaving_;  ///< of graphs
  std::vector<std::unique_ptr<Microbatch>> microbatches_;
  std::vector<at::Tensor> losses_;
};

}  // namespace flatshard
