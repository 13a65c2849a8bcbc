#pragma once

#include "flatshard/optim/optimizer.h"

namespace flatshard {

struct SgdOptions {
  double momentum = 0.0;
  double weight_decay = 0.0;
  StateOffload offload;
};

/// An Optimizer that updates all parameters with SGD with momentum and
/// decoupled weight decay. State per group: momentum, float32, only when the
/// factor of a parameter is not 0.
class Sgd : public Optimizer {
 public:
  /// As AdamW's constructor.
  Sgd(std::vector<ParamGroup*> groups, SgdOptions options);
};

}  // namespace flatshard
