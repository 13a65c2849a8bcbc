#pragma once

#include "flatshard/schedule/events.h"
#include "flatshard/unit/unit_gradients.h"
#include "flatshard/unit/unit_parameter.h"
#include "flatshard/unit/unit_pointers.h"
#include "flatshard/unit/unit_weights.h"

#include <string>

namespace flatshard {

namespace nn {
class Module;
}

/// One module whose weights are unsharded and resharded together: its
/// parameters, the groups that shard them, and the contents of its slots. The
/// Scheduler decides the time of each action. The Executor has slots, and the
/// progress of the streams.
class Unit {
 public:
  /// @param module  null: another caller than its hooks notifies the Runtime
  ///   when its forward starts and ends.
  Unit(
      UnitId id,
      std::string name,
      nn::Module* module,
      UnitGroups groups,
      UnitParameters parameters);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  UnitId id() const { return id_; }
  const std::string& name() const { return name_; }
  /// The root module owns it. May be null.
  nn::Module* module() const { return module_; }
  const UnitGroups& groups() const { return groups_; }
  UnitParameters& parameters() { return parameters_; }
  const UnitParameters& parameters() const { return parameters_; }

  UnitWeights& weights() { return weights_; }
  const UnitWeights& weights() const { return weights_; }
  UnitGradients& gradients() { return gradients_; }
  const UnitGradients& gradients() const { return gradients_; }
  UnitPointers& pointers() { return pointers_; }

  /// Writes by other code to weights of its groups count from now
  /// on.
  void adopt_foreign_writes();

  /// UnitWeights::resident.
  bool resident() const { return weights_.resident(); }
  /// Returns the description for the Scheduler.
  UnitSpec spec(UnitId parent, UnitPolicy policy) const;

 private:
  UnitId id_;
  std::string name_;
  nn::Module* module_;
  UnitGroups groups_;
  UnitParameters parameters_;
  UnitWeights weights_;
  UnitGradients gradients_;
  UnitPointers pointers_;
};

}  // namespace flatshard
