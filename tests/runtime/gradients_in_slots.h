#pragma once

#include "flatshard/runtime/observer.h"

namespace flatshard::testing {

/// With it, layers write all gradients to slots, and none to the sum of
/// microbatches. Eager steps then round them as graphs of regions do.
struct GradientsInSlots : GradientObserver {
  bool needs_slots() const override { return true; }
};

}  // namespace flatshard::testing
