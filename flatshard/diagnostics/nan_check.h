#pragma once

#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/runtime.h"

#include <memory>

namespace flatshard {

/// Finds NaN and infinite values and reports the parameter, its tensor (weight
/// or gradient), the rank and the first element.
///
/// Gradients are checked once this rank has the full gradient of a unit, just
/// before the unit's reduction: afterwards the mean has spread over the ranks
/// and its origin is lost. One pass over the gradient per unit, and the host
/// waits for it.
///
/// Every check throws Error{usage} on the rank that has the value.
class NanCheck : public GradientObserver {
 public:
  /// Watches the gradients of `runtime` from now on.
  static std::shared_ptr<NanCheck> install(
      const std::shared_ptr<Runtime>& runtime);

  /// This rank's shards of the reduced gradients, before the optimizer's step:
  /// what only the reduction made infinite. Blocks the host.
  static void check_reduced_gradients(const Runtime& runtime);
  /// This rank's shards of the main weights. Blocks the host.
  static void check_weights(const Runtime& runtime);

  /// false: gradients are not looked at until it is true again.
  void set_enabled(bool enabled) { enabled_ = enabled; }

  void gradients_ready(Unit& unit, const SlotView& slot) override;
  bool needs_slots() const override { return enabled_; }

 private:
  bool enabled_ = true;
};

}  // namespace flatshard
