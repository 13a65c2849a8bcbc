#pragma once

#include "flatshard/mesh/mesh.h"
#include "flatshard/nn/hooks.h"
#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// DebugOptions::strict: follows the life cycle of units and names the module
/// whose cycle broke, by Error{usage}:
///
/// - a module that owns parameters is called while its unit's forward does not
///   run,
/// - a parameter gets a gradient although its unit had no forward with these
///   weights,
/// - an outermost forward still waits for its backward at the end of the step,
/// - ranks call different units, or end the step at different places.
///
/// The last one makes every forward and every end of a step collective, and
/// blocks the host.
class StrictChecks : public StepObserver, public GradientObserver {
 public:
  /// Called before the first forward of `runtime`. Its units have modules.
  /// @throws Error{config} without modules, Error{usage} for a module that owns
  ///   parameters and does not derive from nn::Module.
  static void install(const std::shared_ptr<Runtime>& runtime);

  explicit StrictChecks(RuntimeCore& core);

  void step_ends() override;
  void unit_called(const Unit& unit) override;
  void root_forward_begins(bool weights_changed, bool at_rest) override;
  void unit_forward_begins(const Unit& unit) override;
  void expects_backward(const Unit& unit, CallId call) override;
  void backward_began(Unit& unit, CallId call) override;
  void was_reset() override;
  void gradient_arrived(const Unit& unit, const UnitParameter& parameter)
      override;

 private:
  static void hook_owners(const std::shared_ptr<StrictChecks>& checks);
  /// A module that owns parameters of `unit` is called.
  void module_called(UnitId unit, const std::string& module) const;
  /// Compares the next actions of all ranks; see compare_next.
  void check_next(UnitId next);
  void check_backwards();

  RuntimeCore& core_;  ///< owns this, among its observers
  std::vector<std::string> names_;
  /// Outermost forwards that need a backward and had none: call -> unit.
  std::map<CallId, UnitId> waiting_;
  std::vector<bool> ran_;  ///< per unit, since the weights changed
  std::vector<nn::HookHandle> hooks_;
};

/// All ranks report their next action, the forward of a unit or the end of the
/// step (kNoUnit), before they run it. If they differ, throws Error{usage} on
/// all of them that names the two. Collective; blocks the host.
///
/// @param names  of all units.
void compare_next(
    Mesh& mesh,
    UnitId next,
    const std::vector<std::string>& names,
    std::int64_t step);

}  // namespace flatshard
