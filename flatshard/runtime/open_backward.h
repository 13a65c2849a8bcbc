#pragma once

#include "flatshard/autograd/autograd_events.h"
#include "flatshard/nn/wgrad.h"

#include <set>
#include <vector>

namespace flatshard {

/// The backward of a BackwardPass while it is open, as the Runtime needs it.
struct OpenBackward {
  /// A weight gradient that was put off.
  struct Late {
    ParameterRef parameter;
    int node = 0;
    nn::LateWgrad write;
  };

  /// The forward of another microbatch continues meanwhile, so that units need
  /// not rest at its end.
  bool interleaved = false;
  /// Units whose forward runs once more.
  std::set<UnitId> recomputing;
  /// Layers put weight gradients off, as those of `node`.
  bool delays_wgrad = false;
  int node = 0;
  std::vector<Late> late;
};

}  // namespace flatshard
