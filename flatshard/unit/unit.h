#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/schedule/events.h"
#include "flatshard/unit/parameter_storage.h"
#include "flatshard/unit/slot_view.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

namespace nn {
class Module;
}

/// One parameter of a unit and where its gradient of this backward is.
struct UnitParameter {
  std::string name;
  at::Tensor tensor;  ///< the module's
  std::size_t group = 0;
  std::int64_t index = 0;  ///< in the group's layout
  ParameterStorage storage;
  bool in_slot = false;     ///< the slot holds (a part of) the gradient
  at::Tensor pending_grad;  ///< arrived as a tensor, not yet packed
};

/// One module whose weights are gathered and released together: what lies where
/// in its slots. What happens when is the Scheduler's; slots, and how far the
/// streams are with them, the Executor's.
class Unit {
 public:
  /// @param module  null: somebody else than its hooks tells the Runtime when
  ///   its forward begins and ends.
  Unit(
      UnitId id,
      std::string name,
      nn::Module* module,
      std::vector<std::unique_ptr<ParamGroup>> groups,
      std::vector<UnitParameter> parameters);

  UnitId id() const { return id_; }
  const std::string& name() const { return name_; }
  /// The root module owns it. May be null.
  nn::Module* module() const { return module_; }
  const std::vector<std::unique_ptr<ParamGroup>>& groups() const {
    return groups_;
  }
  std::vector<UnitParameter>& parameters() { return parameters_; }

  /// The one plane that is gathered: the compute weights (WeightPlanes).
  static constexpr PlaneId kComputePlane = 0;

  /// Bytes of the slot that holds the gathered weights of all groups that are
  /// not resident, and of the one for the gradients.
  std::int64_t weights_nbytes() const { return weights_nbytes_; }
  std::int64_t grads_nbytes() const { return grads_nbytes_; }
  bool resident() const { return weights_nbytes_ == 0; }
  bool has_refresh() const;
  /// Microbatches were accumulated but not reduced over all ranks.
  bool has_unreduced_grad() const;
  /// Rises with every change of the weights.
  std::int64_t generation() const;
  UnitSpec spec(UnitId parent, UnitPolicy policy) const;

  /// Gathers the weights of all groups into `slot`. Inside Stream::submit.
  void gather_into(
      const SlotView& slot,
      const std::vector<WeightPlanes::Gather>& gathers) const;
  /// @throws Error{usage} when somebody gave a parameter another storage.
  void check_storage() const;
  /// Points the parameters at the slot / at nothing. Resident groups stay.
  /// Checks the storage.
  void point_at(const SlotView& slot);
  void clear();
  /// Points the parameters of resident groups at their weights, for good.
  void point_residents();
  /// Whether the parameters of a unit with a module may be read: they refuse
  /// while no forward or backward of the unit runs, whether or not their values
  /// are there. Nothing happens when it is so already.
  void hide();
  void reveal();

  /// The gradient of `parameter` inside the gradient slot.
  at::Tensor grad_view(const SlotView& slot, const UnitParameter& parameter)
      const;
  /// The whole flat gradient of group `group` inside the slot.
  at::Tensor grad_flat(const SlotView& slot, std::size_t group) const;
  /// Makes the slot complete: packs gradients that came as tensors, zeroes the
  /// parameters that got none and the padding, and tells groups whether they
  /// got any. On the current stream.
  void finish_grads(const SlotView& slot);
  /// Some layers write their gradients into the slot (see nn::WgradSink). True
  /// at first for units with a module.
  void set_writes_in_place(bool writes) { writes_in_place_ = writes; }
  bool writes_in_place() const { return writes_in_place_; }
  /// Forgets gradients of an unfinished backward.
  void drop_grads();

 private:
  /// Bytes from the begin of the group's flat buffer of `dtype`.
  std::int64_t offset_in_group(const UnitParameter& p, at::ScalarType dtype)
      const;

  UnitId id_;
  std::string name_;
  nn::Module* module_;
  std::vector<std::unique_ptr<ParamGroup>> groups_;
  std::vector<UnitParameter> parameters_;
  std::vector<std::int64_t> weights_offset_;  ///< per group, bytes in the slot
  std::vector<std::int64_t> grads_offset_;
  std::vector<std::vector<FlatRange>> padding_;  ///< per group
  std::int64_t weights_nbytes_ = 0;
  std::int64_t grads_nbytes_ = 0;
  bool writes_in_place_;
  bool revealed_ = true;  ///< the parameters of resident groups, if any
  bool has_residents_ = false;
};

}  // namespace flatshard
