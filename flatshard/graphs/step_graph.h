#pragma once

#include "flatshard/device/graph.h"
#include "flatshard/graphs/graph_life.h"
#include "flatshard/nn/module.h"
#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

struct StepEffects;
struct StepStamp;

/// Forward and backward of all microbatches of a step as one graph, with the
/// all-gathers and reductions in it. Clipping, optimizer, evaluation and
/// checkpoints stay outside, between two steps.
///
/// The first steps run eagerly. Then all ranks capture, or none does: capture
/// runs nothing, so the step that captures is replayed as well. A replay costs
/// the host a launch. The step's changes on the host (which gradients exist,
/// which units are unsharded, which actions ran) are kept from the capture and
/// applied. A step that differs from the captured one runs eagerly and is
/// counted. The reason why it differs is the same on all ranks.
///
/// One thread at a time. Destroy it before the mesh of its Runtime, because the
/// mesh's communicators wait for it.
class StepGraph {
 public:
  /// Forward and backward of a step. It reads no data from elsewhere than
  /// `inputs` and memory that stays, and decides nothing on the host by the
  /// values of tensors. It sets the Runtime's microbatch flags itself, and does
  /// not change weights. Returns tensors, such as the loss.
  using Work = std::function<nn::TensorList(const nn::TensorList& inputs)>;

  /// @param runtime  made with GraphOptions::whole_step, of units with modules.
  /// @throws Error{usage} otherwise.
  StepGraph(std::shared_ptr<Runtime> runtime, Work work);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// Runs `work`, in one way or the other, on the current stream and the
  /// Runtime's streams. Collective. Blocks the host when it captures.
  /// @param inputs  copied, unless it is the same memory in every step.
  /// @return  what work returned, detached and owned by the caller.
  nn::TensorList run(const nn::TensorList& inputs);

  /// Drops the graph; another is captured after another warm-up. Between two
  /// steps, on all ranks.
  void reset();
  /// Returns whether the next step is a replay, unless it differs.
  bool captured() const { return life_.replays(); }
  GraphStats stats() const;

 private:
  class Recording;

  bool all_ranks(bool mine) const;
  void drop();
  void drop_if_outdated();
  void try_to_capture(const nn::TensorList& inputs);
  std::vector<at::Tensor> record();
  std::string capture(const nn::TensorList& inputs);
  /// Returns why this step is not a replay; empty: it is.
  std::string miss(const nn::TensorList& inputs) const;
  nn::TensorList replay(const nn::TensorList& inputs);
  void apply(const std::vector<at::Tensor>& outputs);

  std::shared_ptr<Runtime> runtime_;
  RuntimeCore& core_;  ///< its
  Work work_;
  GraphLife life_;
  std::vector<nn::Module*> modules_;
  std::vector<std::size_t> num_own_hooks_;  ///< by module, of the Runtime
  std::shared_ptr<GraphPool> pool_;
  nn::TensorList inputs_;  ///< static
  std::unique_ptr<StepEffects> effects_;
  std::unique_ptr<StepStamp> stamp_;
  std::size_t num_outputs_ = 0;  ///< outputs of the graph; gradients follow
  std::unique_ptr<DeviceGraph> graph_;
  std::string failure_;  ///< GraphPhase::failed: why
};

}  // namespace flatshard
