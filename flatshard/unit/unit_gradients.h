#pragma once

#include "flatshard/layout/flat_layout.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/shape/unit_plan.h"
#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace flatshard {

/// The gradients of a unit's backward, until its groups reduce them: their
/// places in the gradient slot, and the code that fills it.
class UnitGradients {
 public:
  /// @param groups, parameters, layout  outlive this.
  UnitGradients(
      const UnitGroups& groups,
      UnitParameters& parameters,
      const UnitLayout& layout,
      bool writes_in_place);

  /// Returns the bytes of the slot.
  std::int64_t nbytes() const { return layout_.slots.grad_nbytes; }
  /// Returns the gradient of `parameter` inside the slot.
  at::Tensor view(const SlotView& slot, const UnitParameter& parameter) const;
  /// [layout.numel()] the full flat gradient of group `group` inside the slot.
  at::Tensor flat(const SlotView& slot, std::size_t group) const;
  /// Returns where a layer writes the gradient of parameter `index`, and
  /// whether it adds to what an earlier call of the layer wrote.
  nn::WgradTarget target(const SlotView& slot, std::size_t index);
  /// Returns the sum of the step's microbatches, if nothing has to happen to
  /// this rank's gradient before it is added there; see
  /// GradientPipeline::open_sum.
  std::optional<nn::WgradTarget> sum_target(
      std::size_t index,
      bool collective,
      bool is_last,
      bool may_allocate = true);
  /// A layer wrote it to the last target that it got.
  void mark_written(std::size_t index) {
    Arrival& arrival = arrivals_[index];
    (arrival.goes_to_sum ? arrival.is_in_sum : arrival.is_in_slot) = true;
  }
  /// It arrived as a tensor of any layout, and is added to earlier ones.
  void add(std::size_t index, const at::Tensor& grad);
  /// Returns the number of gradients that arrived as tensors and are not in the
  /// slot yet.
  std::size_t num_pending() const;
  /// Completes the slot: packs gradients that arrived as tensors, zeroes the
  /// parameters without a gradient and the padding, and marks in groups which
  /// of them got one. On the current stream.
  void finish(const SlotView& slot);
  /// Forgets the gradients of an unfinished backward.
  void drop();
  /// Some layers write their gradients into the slot (see nn::WgradSink). True
  /// at first for units with a module.
  void set_writes_in_place(bool writes) { writes_in_place_ = writes; }
  bool writes_in_place() const { return writes_in_place_; }
  /// Returns whether microbatches were accumulated but not reduced over all
  /// ranks.
  bool has_unreduced() const;

 private:
  /// The gradient of one parameter in this backward.
  struct Arrival {
    bool is_in_slot = false;  ///< all of it, or a part
    bool is_in_sum = false;   ///< the same
    bool goes_to_sum = false;
    at::Tensor pending;  ///< came as a tensor, and is not packed yet
  };

  const UnitGroups& groups_;
  UnitParameters& parameters_;
  const UnitLayout& layout_;
  std::vector<Arrival> arrivals_;                ///< per parameter
  std::vector<std::vector<FlatRange>> padding_;  ///< per group
  bool writes_in_place_;
};

}  // namespace flatshard
