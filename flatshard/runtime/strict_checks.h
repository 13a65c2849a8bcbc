#pragma once

#include "flatshard/mesh/mesh.h"
#include "flatshard/schedule/events.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard {

/// Follows the life cycle of units (DebugOptions::strict) and names the module
/// whose cycle broke. Host side only: it sees the Runtime's events and holds no
/// tensors.
class StrictChecks {
 public:
  explicit StrictChecks(std::vector<std::string> unit_names);

  void forward_begin(UnitId unit);
  /// An outermost forward ended, and a backward is to come.
  void expect_backward(UnitId unit, CallId call);
  /// The backward of a call begins.
  void backward_begin(CallId call);
  void reset();

  /// A module below `unit` that owns parameters of it is called.
  /// @param runs  the unit has an open forward, or is gathered for a backward
  ///   that runs.
  /// @throws Error{usage} when it does not.
  void module_called(UnitId unit, const std::string& module, bool runs) const;

  /// A gradient of one of the unit's parameters arrived.
  /// @throws Error{usage} when the unit had no forward with these weights: it
  /// was not called through its holder.
  void parameter_done(UnitId unit, const std::string& parameter) const;

  /// @throws Error{usage} when an outermost forward still waits for a backward.
  void end_step();
  /// Gradients from here on are of forwards from here on.
  void weights_changed();

  const std::vector<std::string>& unit_names() const { return names_; }

 private:
  const std::string& name(UnitId unit) const { return names_[unit]; }

  std::vector<std::string> names_;
  /// Outermost forwards that want a backward and had none: call -> unit.
  std::map<CallId, UnitId> waiting_;
  std::vector<bool> ran_;  ///< per unit, since the weights changed
};

/// All ranks say what they do next, the forward of a unit or the end of the
/// step (kNoUnit), before they do it. When they differ, throws Error{usage} on
/// all of them that names the two. Collective; blocks the host.
///
/// @param names  of all units.
void compare_next(
    Mesh& mesh,
    UnitId next,
    const std::vector<std::string>& names,
    std::int64_t step);

}  // namespace flatshard
