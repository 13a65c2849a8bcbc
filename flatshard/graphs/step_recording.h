#pragma once

#include "flatshard/autograd/autograd_events.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/graphs/step_graph.h"
#include "flatshard/group/gradient_pipeline.h"
#include "flatshard/group/weight_planes.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/schedule/scheduler.h"

#include <optional>
#include <vector>

// The host's side of a step.
namespace flatshard {

/// The effects of a step on the host.
struct StepEffects {
  struct Group {
    GradientPipeline::Contents gradients;
    bool is_gathered = false;
    bool was_gathered = false;  ///< at its start
  };
  std::vector<Group> groups;  ///< as Runtime::all_groups
  Scheduler before;           ///< as the step found it
  /// The state after the step. Its actions belong only to this step.
  StepState after;
  std::vector<ScheduleEvent> events;  ///< for RuntimeOptions::trace
  nn::TensorList constants;           ///< of regions
};

/// While a step is recorded, the Runtime is as if nothing had been done since
/// the weights changed. All its streams follow the current one, and nothing
/// refers to work that is not recorded. Then it is as it was before.
class StepGraph::Recording {
 public:
  /// @param first  of an emulation that records again: what it was captured
  ///   with decides what it does, as in a graph. Null: this is the capture.
  Recording(Runtime& runtime, const StepEffects* first);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Ends the recording of the step.
  /// @throws Error{usage} when it left something open.
  StepEffects end();

 private:
  void check_rest() const;
  void restore();

  RuntimeCore& core_;
  KeptConstants& constants_;
  std::vector<ParamGroup*> groups_;
  bool ended_ = false;
  std::vector<bool> was_gathered_;
  Scheduler before_;
  // The former state.
  StepState state_;
  std::vector<GatherProgress> progress_;
  RuntimeTrace trace_;
  bool measures_exposed_;
  std::optional<AutogradEvents::OwnAccumulators> accumulators_;
};

}  // namespace flatshard
