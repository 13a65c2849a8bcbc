#pragma once

#include "flatshard/float8/matmul.h"
#include "flatshard/group/param_group.h"
#include "flatshard/nn/weight_source.h"
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
  const std::vector<UnitParameter>& parameters() const { return parameters_; }

  /// The planes that are gathered: the compute weights (WeightPlanes), and in
  /// units with FP8 weights (Float8Planes) what their forwards and their
  /// backwards read.
  static constexpr PlaneId kComputePlane = 0;
  static constexpr PlaneId kRowPlane = 1;
  static constexpr PlaneId kColumnPlane = 2;

  /// What `spec` says of planes, and their slices.
  const UnitSpec& planes() const { return planes_; }
  /// Before the Runtime has it.
  void set_gather_parts(GatherParts parts);
  bool has_float8() const { return planes_.weights_nbytes.size() > 1; }
  /// Whether `plane` has weights of the group.
  bool is_in_plane(const ParamGroup& group, PlaneId plane) const {
    return (group.weights().float8() != nullptr) == (plane != kComputePlane);
  }
  /// Bytes of the slot that holds a plane, or a part of one, of all groups that
  /// are not resident; and of the one for the gradients.
  std::int64_t slot_nbytes(PlaneId plane, PartId part) const {
    return planes_.nbytes(plane, part);
  }
  std::int64_t weights_nbytes() const { return weights_nbytes_; }
  std::int64_t grads_nbytes() const { return grads_nbytes_; }
  bool resident() const { return resident_; }
  /// The plane has no slot.
  bool rests(PlaneId plane) const {
    return resident_ && !transient_.contains(plane);
  }
  /// Microbatches were accumulated but not reduced over all ranks.
  bool has_unreduced_grad() const;
  /// Rises with every change of the weights.
  std::int64_t generation() const;
  UnitSpec spec(UnitId parent, UnitPolicy policy) const;

  /// Gathers a plane of all groups, or a part of one, into `slot`. Inside
  /// Stream::submit.
  /// @param gathers  by group; those that are not in the plane are not used.
  void gather_into(
      const SlotView& slot,
      PlaneId plane,
      PartId part,
      const std::vector<WeightPlanes::Gather>& gathers) const;
  /// Makes the columns, or a part of them, of gathered rows.
  void derive_into(PartId part, const SlotView& rows, const SlotView& columns)
      const;
  /// The part that has the parameter; kWhole where there are none.
  PartId part_of(const UnitParameter& parameter) const;
  /// A parameter of an FP8 group as one product reads it: kRowPlane, or
  /// kColumnPlane with transposed data.
  /// @param slot  that holds `part` of the plane; resident groups use none.
  float8::Operand float8_operand(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  /// The same as it lies in the slot.
  float8::Plane float8_view(
      const UnitParameter& parameter,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  static PlaneId plane_of(nn::PlaneUse use) {
    return use == nn::PlaneUse::fprop ? kRowPlane : kColumnPlane;
  }
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
  void add_float8_planes();
  /// What group `g` has of the slot for a plane or a part of one.
  at::Tensor float8_slot(
      std::size_t g,
      PlaneId plane,
      PartId part,
      const SlotView& slot) const;
  /// Bytes from the begin of the group's flat buffer of `dtype`.
  std::int64_t offset_in_group(const UnitParameter& p, at::ScalarType dtype)
      const;

  UnitId id_;
  std::string name_;
  nn::Module* module_;
  std::vector<std::unique_ptr<ParamGroup>> groups_;
  std::vector<UnitParameter> parameters_;
  /// Per plane and group, bytes in the slot.
  std::vector<std::vector<std::int64_t>> weights_offset_;
  /// A part of the FP8 planes: a part of one group's.
  struct Part {
    std::size_t group = 0;
    int part = 0;
  };
  std::vector<Part> parts_;
  UnitSpec planes_;
  std::vector<std::int64_t> grads_offset_;
  std::vector<std::vector<FlatRange>> padding_;  ///< per group
  std::int64_t weights_nbytes_ = 0;
  std::int64_t grads_nbytes_ = 0;
  bool writes_in_place_;
  bool revealed_ = true;  ///< the parameters of resident groups, if any
  bool has_residents_ = false;
  bool resident_ = true;
  PlaneSet transient_;  ///< UnitSpec::transient
};

}  // namespace flatshard
