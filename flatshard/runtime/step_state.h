#pragma once

#include "flatshard/schedule/scheduler.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// The state that forwards, backwards and steps change on the host, in addition
/// to the parameter groups' own. A value: recording, replaying or undoing a
/// step assigns it.
struct StepState {
  Scheduler scheduler;
  bool is_last_microbatch = true;
  bool sync_gradients = true;
  /// The sum of the units' UnitWeights::generation at the start of the step.
  std::int64_t generation = -1;
  /// Since the weights last changed.
  std::vector<Action> actions;
  /// For each unit: the program requested its weights itself, so they are not
  /// hidden.
  std::vector<bool> unsharded;
  /// A backward with create_graph left a graph that reads the weights.
  bool graph_reads_weights = false;
  /// The error of an action; from then to the reset no event has an effect.
  std::string failure;

  bool failed() const { return !failure.empty(); }
  bool operator==(const StepState&) const = default;
};

}  // namespace flatshard
