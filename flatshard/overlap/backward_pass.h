#pragma once

#include "flatshard/autograd/autograd_call.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/runtime/open_backward.h"
#include "flatshard/schedule/events.h"

#include <cstddef>
#include <map>
#include <memory>

namespace flatshard {

class Runtime;
struct RuntimeCore;

/// Forward and backward of one microbatch, for a schedule that runs modules in
/// pieces and marks the start and end of each unit: no tensor is watched, and
/// the backward may consist of any number of runs of the autograd engine. Each
/// unit runs once.
///
///     const auto pass = std::make_unique<BackwardPass>(runtime);
///     pass->forward_begin(unit) ... pass->forward_end(unit)
///     pass->open_backward({.is_last = m + 1 == microbatches});
///     pass->backward_begin(unit) ... pass->backward_end(unit)
///     pass->close_backward();
///
/// Between open and close, runs of the engine belong to this pass, and forwards
/// of another pass may continue. One backward is open at a time. A pass that is
/// destroyed before its close is abandoned: the next root forward drops the
/// gradients of the step, as after an exception.
class BackwardPass {
 public:
  /// @param tells_graphs  the caller passes to RegionGraphs which microbatch
  ///   runs, so that their graphs may be replayed.
  explicit BackwardPass(
      std::shared_ptr<Runtime> runtime,
      bool tells_graphs = false);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  // Forward ------------------------------------------------------------------

  /// Unshards the unit's weights and lets the caller read its parameters.
  /// @throws Error{usage} if the unit ran in this pass already.
  void forward_begin(UnitId unit);
  /// Ends the forward of the unit that started last and reshards its weights,
  /// unless they are kept.
  /// @param more_follow  another pass runs the unit next, or has started to:
  ///   its weights stay unsharded for it.
  void forward_end(UnitId unit, bool more_follow = false);

  // Backward -----------------------------------------------------------------

  struct Options {
    /// See Runtime::set_is_last_microbatch.
    bool is_last = true;
    /// The forward of another microbatch continues meanwhile, and its backward
    /// comes later. Its weights stay, and nothing is joined.
    bool interleaved = false;
  };
  /// @throws Error{usage} while a backward of another pass is open, or a
  ///   forward of this one.
  void open_backward(const Options& options);
  /// Unshards what the unit's backward reads; reduces units before it.
  void backward_begin(UnitId unit);
  /// Its forward runs once more from here to recompute_end.
  void recompute_begin(UnitId unit);
  void recompute_end(UnitId unit);
  /// Called when all gradients of the unit exist or are delayed: its weights
  /// go.
  void backward_end(UnitId unit);
  /// Lets layers that can delay the weight gradients of the next modules delay
  /// them until run_wgrads. false, as at first: gradients come at once.
  /// @param node  any number, by which run_wgrads finds them.
  void set_delay_wgrad(bool delays, int node = 0) {
    backward_.delays_wgrad = delays;
    backward_.node = node;
  }
  /// Computes the delayed gradients of a unit's node.
  void run_wgrads(UnitId unit, int node);
  /// Weight gradients that are still delayed are computed first.
  void close_backward();

  /// Number of weight gradients that are delayed now.
  std::size_t num_late() const { return backward_.late.size(); }

 private:
  UnitCall& call_of(UnitId unit);
  void run_late(const OpenBackward::Late& late);

  const std::shared_ptr<Runtime> runtime_;
  RuntimeCore& core_;  ///< its
  std::map<UnitId, std::shared_ptr<UnitCall>> calls_;
  /// While the backward is open; AutogradEvents sees it go.
  std::shared_ptr<int> token_;
  TaskId task_ = -1;
  OpenBackward backward_;
  bool open_ = false;
  bool closed_ = false;
};

}  // namespace flatshard
