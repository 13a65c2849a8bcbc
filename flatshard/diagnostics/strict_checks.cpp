#include "flatshard/diagnostics/strict_checks.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/module_tree.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

namespace flatshard {

StrictChecks::StrictChecks(RuntimeCore& core)
    : core_(core), ran_(core.units.size(), false) {
  for (const auto& unit : core.units) {
    names_.push_back(unit->name());
  }
}

void StrictChecks::install(const std::shared_ptr<Runtime>& runtime) {
  FLATSHARD_CHECK(
      runtime->units().front()->module() != nullptr,
      config,
      "debug.strict watches modules of nn::Module; these units have none");
  const auto checks = std::make_shared<StrictChecks>(runtime->core());
  hook_owners(checks);
  runtime->add_observer(checks);
}

void StrictChecks::hook_owners(const std::shared_ptr<StrictChecks>& checks) {
  const RuntimeCore& core = checks->core_;
  std::set<std::pair<const torch::nn::Module*, UnitId>> seen;
  for (const auto& p : nn::named_parameters(*core.units.front()->module())) {
    const ParameterRef* const found = core.events.find(p.tensor);
    if (found == nullptr) {
      continue;  // ignored
    }
    const UnitId unit = found->unit;
    const auto dot = p.name.rfind('.');
    const std::string module =
        dot == std::string::npos ? "root" : p.name.substr(0, dot);
    auto* owner = dynamic_cast<nn::Module*>(p.owner);
    FLATSHARD_CHECK(
        owner != nullptr,
        usage,
        "module {} owns parameter {} of unit {} and has no hooks, so strict "
        "checks cannot verify its calls; derive it from flatshard::nn::Module, "
        "or turn strict off",
        module,
        p.name,
        checks->names_[unit]);
    if (!seen.emplace(p.owner, unit).second) {
      continue;
    }
    checks->hooks_.push_back(owner->add_forward_pre_hook(
        [weak = std::weak_ptr(checks),
         unit,
         module](nn::Module&, const nn::TensorList&) {
          if (const auto self = weak.lock()) {
            self->module_called(unit, module);
          }
        }));
  }
}

void StrictChecks::module_called(UnitId unit, const std::string& module) const {
  const std::lock_guard lock(core_.mutex);
  const bool runs = core_.events.is_open(unit) ||
                    (AutogradEvents::in_backward() &&
                     core_.executor.has_weights(*core_.units[unit]));
  FLATSHARD_CHECK(
      runs,
      usage,
      "module {} was called, but its weights belong to unit {} and are not "
      "unsharded, because the forward of that unit is not running; call the "
      "unit through its holder (`block(x)`, not `block->forward(x)` or one of "
      "its submodules), or make {} a separate unit (FullyShardOptions::units)",
      module,
      names_[unit],
      module);
}

void StrictChecks::unit_called(const Unit& unit) {
  check_next(unit.id());
}

void StrictChecks::check_next(UnitId next) {
  // After a backward that failed, reductions may still be under way. They use
  // the same communicator.
  core_.executor.streams().synchronize_reductions();
  compare_next(*core_.mesh, next, names_, core_.executor.step());
}

void StrictChecks::root_forward_begins(bool weights_changed, bool at_rest) {
  if (weights_changed) {
    std::fill(ran_.begin(), ran_.end(), false);
    check_backwards();
  }
}

void StrictChecks::unit_forward_begins(const Unit& unit) {
  ran_[unit.id()] = true;
}

void StrictChecks::expects_backward(const Unit& unit, CallId call) {
  waiting_.emplace(call, unit.id());
}

void StrictChecks::backward_began(Unit& unit, CallId call) {
  waiting_.erase(call);
}

void StrictChecks::gradient_arrived(
    const Unit& unit,
    const UnitParameter& parameter) {
  FLATSHARD_CHECK(
      ran_[unit.id()],
      usage,
      "parameter {} got a gradient, but its unit {} had no forward since the "
      "weights changed: the forward ran without the unit's hooks, or the "
      "parameter was used outside the unit; call the unit through its holder "
      "(`block(x)`, not `block->forward(x)`)",
      parameter.name,
      unit.name());
}

void StrictChecks::was_reset() {
  waiting_.clear();
}

void StrictChecks::step_ends() {
  // First, so that a rank on which the rest fails does not leave others here.
  check_next(kNoUnit);
  const std::lock_guard lock(core_.mutex);
  check_backwards();
  FLATSHARD_CHECK(
      core_.step.scheduler.resting(),
      usage,
      "at the end of step {} these units are still in use: {}; a forward or "
      "backward of each has not ended",
      core_.executor.step(),
      fmt::join(core_.step.scheduler.busy_units(), ", "));
}

void StrictChecks::check_backwards() {
  if (waiting_.empty()) {
    return;
  }
  const UnitId unit = waiting_.begin()->second;
  const auto count = waiting_.size();
  waiting_.clear();
  FLATSHARD_THROW(
      usage,
      "{} forward(s) of module {} required a backward that did not run before "
      "the end of the step, so their weights stayed unsharded; call backward "
      "before the optimizer step, or run the forward under at::NoGradGuard",
      count,
      names_[unit]);
}

void compare_next(
    Mesh& mesh,
    UnitId next,
    const std::vector<std::string>& names,
    std::int64_t step) {
  if (mesh.size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto options =
      at::TensorOptions().dtype(at::kLong).device(mesh.device());
  const at::Tensor all = at::empty({mesh.size()}, options);
  mesh.world(Purpose::reduce).all_gather(all, at::full({1}, next, options));
  const at::Tensor host = all.cpu();
  const auto said = host.accessor<std::int64_t, 1>();
  const auto text = [&](std::int64_t unit) {
    return unit == kNoUnit ? std::string("ended the step")
                           : "called module " + names[unit];
  };
  for (int rank = 1; rank < mesh.size(); ++rank) {
    FLATSHARD_CHECK(
        said[rank] == said[0],
        usage,
        "ranks ran their modules in different orders in step {}: rank 0 {}, "
        "rank {} {}; all ranks have to call the same units in the same order",
        step,
        text(said[0]),
        rank,
        text(said[rank]));
  }
}

}  // namespace flatshard
