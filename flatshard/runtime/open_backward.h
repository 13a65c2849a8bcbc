#pragma once

#include "flatshard/autograd/autograd_events.h"
#include "flatshard/nn/wgrad.h"

#include <set>
#include <vector>

namespace flatshard {

/// The backward of a BackwardPass while it is open, as the Runtime needs it.
struct OpenBackward {
  /// A delayed weight gradient.
  struct Late {
    ParameterRef parameter;
    int node = 0;
    nn::LateWgrad wgrad;
  };

  /// The forward of another microbatch continues meanwhile, so that units need
  /// not rest at its end.
  bool interleaved = false;
  /// Units whose forward runs once more.
  std::set<UnitId> recomputing;
  /// Layers put weight gradients off, for `node`.
  bool delays_wgrad = false;
  int node = 0;
  std::vector<Late> late;
};

}  // namespace flatshard
