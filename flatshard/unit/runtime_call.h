#pragma once

#include "flatshard/unit/runtime.h"

#include <map>
#include <memory>
#include <vector>

namespace flatshard {

/// One forward of one unit: what the hooks on its inputs and outputs share.
struct Runtime::Call {
  UnitId unit = kNoUnit;
  CallId id = -1;
  bool recompute = false;
  /// The unit's weights at forward; the backward must see the same.
  std::int64_t generation = 0;
  /// Inputs whose gradient a hook announces, and whether some wanted input
  /// cannot be watched (a leaf): then the backward ends with its task.
  int num_watched_inputs = 0;
  bool has_unwatched_input = false;
  /// Per graph task in which this call's backward began: inputs still to come.
  std::map<TaskId, int> inputs_left;
};

/// The gradient of one tensor that a unit put out.
struct Runtime::OutputPoint {
  std::weak_ptr<torch::autograd::Node> node;
  /// Calls that took the tensor as input; their backward through it is over
  /// when the gradient is complete, before the producer's begins.
  std::vector<std::weak_ptr<Call>> consumers;
};

}  // namespace flatshard
