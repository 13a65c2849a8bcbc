#pragma once

#include "flatshard/layout/flat_layout.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// The gradients of a unit's backward, until its groups reduce them: what lies
/// where in the gradient slot, and what fills it.
class UnitGradients {
 public:
  /// @param groups, parameters  outlive this.
  UnitGradients(
      const UnitGroups& groups,
      UnitParameters& parameters,
      bool writes_in_place);

  /// Of the slot.
  std::int64_t nbytes() const { return nbytes_; }
  /// The gradient of `parameter` inside the slot.
  at::Tensor view(const SlotView& slot, const UnitParameter& parameter) const;
  /// [layout.numel()] the whole flat gradient of group `group` inside the slot.
  at::Tensor flat(const SlotView& slot, std::size_t group) const;
  /// Makes the slot complete: packs gradients that came as tensors, zeroes the
  /// parameters that got none and the padding, and tells groups whether they
  /// got any. On the current stream.
  void finish(const SlotView& slot);
  /// Forgets those of an unfinished backward.
  void drop();
  /// Some layers write their gradients into the slot (see nn::WgradSink). True
  /// at first for units with a module.
  void set_writes_in_place(bool writes) { writes_in_place_ = writes; }
  bool writes_in_place() const { return writes_in_place_; }
  /// Microbatches were accumulated but not reduced over all ranks.
  bool has_unreduced() const;

 private:
  const UnitGroups& groups_;
  UnitParameters& parameters_;
  std::vector<std::int64_t> offsets_;            ///< per group, bytes
  std::vector<std::vector<FlatRange>> padding_;  ///< per group
  std::int64_t nbytes_ = 0;
  bool writes_in_place_;
};

}  // namespace flatshard
