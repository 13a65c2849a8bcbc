#pragma once

#include "flatshard/autograd/autograd_node.h"
#include "flatshard/schedule/events.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

// The state that AutogradEvents keeps of a program.
namespace flatshard {

/// One forward of one unit: what the hooks on its inputs and outputs share.
struct UnitCall {
  UnitId unit = kNoUnit;
  CallId id = -1;
  bool recompute = false;
  /// The unit's weights at forward; the backward must see the same.
  std::int64_t generation = 0;
  /// Position among all forwards, in the order of their ends.
  std::int64_t end = -1;
  /// Nodes that made its outputs: its backward starts before they run.
  std::vector<WeakNodePtr> output_nodes;
  /// Inputs whose gradient a hook announces, and whether some needed input
  /// cannot be watched (a leaf): then the backward ends with its task.
  int num_watched_inputs = 0;
  bool has_unwatched_input = false;
  /// Bytes that it keeps for its backward outside the device.
  std::int64_t kept_nbytes = 0;
  /// The leaves of a recompute. They exist no longer than it.
  std::vector<const c10::TensorImpl*> leaf_inputs;
  /// Per graph task in which this call's backward started: inputs to come.
  std::map<TaskId, int> inputs_left;
};

/// A backward that runs, from its first event on.
///
/// Calls start their backward in the reverse order of their forwards' ends: a
/// call starts together with all later ones that have not started. The engine
/// keeps to that order (it runs the youngest node that is ready), except for a
/// unit that returns its own input: the gradient of that tensor may be complete
/// much later. Whether a unit does so may depend on the rank, while the order
/// of its collectives must not.
struct BackwardTask {
  std::weak_ptr<void> alive;  ///< expired: the backward threw
  std::vector<std::shared_ptr<UnitCall>> to_begin;  ///< the next one last
};

/// A tensor that is an input or output of units, with one hook for all of them.
///
/// When its gradient is complete, the forward's uses of the tensor are undone
/// in reverse: a call that read it has ended, and then the call that returned
/// it starts. A unit that returns its own input did both, and an enclosing unit
/// may return the same tensor as its last child. So the order of hooks would
/// not do.
struct WatchedTensor {
  struct Use {
    std::shared_ptr<UnitCall> call;
    bool is_output = false;  ///< else an input
  };

  WeakNodePtr node;
  std::vector<Use> uses;  ///< in the order of forward
};

}  // namespace flatshard
