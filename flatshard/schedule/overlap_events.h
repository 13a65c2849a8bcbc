#pragma once

#include "flatshard/schedule/events.h"
#include "flatshard/schedule/overlap_plan.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace flatshard {

/// The units of a model that runs by an OverlapPlan, each layer one unit below
/// the root. Also counts the parameters of each unit that get a gradient in
/// each node's backward.
struct PlanUnits {
  struct LayerGrads {
    int attend = 0;
    int shared = 0;
    int experts = 0;
  };
  /// Units before and after the layers.
  struct Ends {
    UnitId embed = 0;
    UnitId head = 0;
  };
  UnitId root = 0;
  std::optional<Ends> ends;  ///< unset: both belong to the root
  std::vector<UnitId> layers;
  std::vector<LayerGrads> layer_grads;  ///< as many
  /// Of each layer's call: see ScheduleEvent. Empty: nothing leaves the device.
  std::vector<std::int64_t> kept_nbytes;
  int embed_grads = 0;
  /// false: the embedding is frozen, and the first layer's input has no
  /// gradient.
  bool embed_has_backward = true;
  int head_grads = 0;
  int root_grads = 0;  ///< in addition to the ends' gradients, in the head's
                       ///< backward

  /// Returns the unit whose weights the step reads.
  UnitId unit_of(const PlanStep& step) const;
};

/// Returns the events of a Scheduler while `plan` runs. A unit's forward ends
/// with the last node that reads weights. Its backward starts with its first
/// step and ends with the attend node. A step's end is never a task's end.
std::vector<ScheduleEvent> plan_events(
    const OverlapPlan& plan,
    const PlanUnits& units,
    const OverlapPlanOptions& options);

/// Returns the same events by step of the plan.
std::vector<std::vector<ScheduleEvent>> plan_events_by_step(
    const OverlapPlan& plan,
    const PlanUnits& units,
    const OverlapPlanOptions& options);

}  // namespace flatshard
