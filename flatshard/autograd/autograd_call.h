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
  /// Nodes that made its outputs: its backward begins before theirs.
  std::vector<WeakNodePtr> output_nodes;
  /// Inputs whose gradient a hook announces, and whether some wanted input
  /// cannot be watched (a leaf): then the backward ends with its task.
  int num_watched_inputs = 0;
  bool has_unwatched_input = false;
  /// The leaves of a recompute, which exist no longer than it.
  std::vector<const c10::TensorImpl*> leaf_inputs;
  /// Per graph task in which this call's backward began: inputs still to come.
  std::map<TaskId, int> inputs_left;
};

/// A backward that runs, from its first event on.
///
/// Calls begin their backward in the reverse order of their forwards' ends: a
/// call begins together with all later ones that did not begin yet. The engine
/// keeps to that order (it runs the youngest node that is ready), except for a
/// unit that returns its own input: the gradient of that tensor may be complete
/// much later. Whether a unit does so may depend on the rank, while the order
/// of its collectives must not.
struct BackwardTask {
  std::weak_ptr<void> alive;  ///< expired: the backward threw
  std::vector<std::shared_ptr<UnitCall>> to_begin;  ///< the next one last
};

/// A tensor that units take or give, with one hook for all of them.
///
/// When its gradient is complete, what happened to it in forward is undone
/// backwards: a call that took it is over, and then the call that gave it
/// begins. A unit that returns its own input did both, and an enclosing unit
/// may give the very tensor that its last child gave. So the order of hooks
/// would not do.
struct WatchedTensor {
  struct Use {
    std::shared_ptr<UnitCall> call;
    bool is_output = false;  ///< else an input
  };

  WeakNodePtr node;
  std::vector<Use> uses;  ///< in the order of forward
};

}  // namespace flatshard
