#pragma once

#include "flatshard/unit/slot_view.h"
#include "flatshard/unit/unit_parameter.h"
#include "flatshard/unit/unit_weights.h"

#include <string>

namespace flatshard {

/// The memory that a unit's parameters point at, and whether a program may read
/// them.
class UnitPointers {
 public:
  /// Points the parameters of resident groups at their weights, permanently.
  /// @param unit     its name, for messages.
  /// @param refuses  reads of hidden parameters raise an error.
  /// @param groups, parameters, weights  outlive this.
  UnitPointers(
      std::string unit,
      bool refuses,
      const UnitGroups& groups,
      UnitParameters& parameters,
      const UnitWeights& weights);

  /// @throws Error{usage} when a parameter's storage was replaced.
  void check_storage() const;
  /// Called before clear().
  /// @throws Error{usage} when an array of another library may still read the
  ///   memory of a parameter.
  void check_not_shared() const;
  /// Points the parameters at the slot / at nothing. Resident groups stay.
  /// Checks the storage.
  void point_at(const SlotView& slot);
  void clear();
  /// Sets whether the parameters of a unit with a module may be read: they
  /// raise an error while no forward or backward of the unit runs, whether or
  /// not their values exist. Nothing happens when it is so already.
  void hide();
  void show();

 private:
  const std::string unit_;
  const bool refuses_;
  const UnitGroups& groups_;
  UnitParameters& parameters_;
  const UnitWeights& weights_;
  bool shown_ = true;  ///< the parameters of resident groups, if any
  bool has_residents_ = false;
};

}  // namespace flatshard
