// What DebugOptions ask of the Runtime; nothing here runs without them.
#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"
#include "flatshard/unit/autograd_task.h"
#include "flatshard/unit/poison.h"
#include "flatshard/unit/runtime_call.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

namespace flatshard {

void Runtime::set_step(std::int64_t step) {
  step_ = step;
  mesh_->set_step(step);
  executor_.set_step(step);
  if (options_.debug.poison) {
    set_poison_step(step);
  }
}

void Runtime::add_observer(std::shared_ptr<RuntimeObserver> observer) {
  const std::lock_guard lock(mutex_);
  observers_.add(std::move(observer));
}

void Runtime::watch_modules() {
  std::vector<std::string> names;
  for (const auto& unit : units_) {
    names.push_back(unit->name());
  }
  strict_ = std::make_unique<StrictChecks>(std::move(names));
  std::set<std::pair<const torch::nn::Module*, UnitId>> seen;
  for (const auto& p : nn::named_parameters(*units_.front()->module())) {
    const auto found = parameters_.find(p.tensor.unsafeGetTensorImpl());
    if (found == parameters_.end()) {
      continue;  // ignored
    }
    const UnitId unit = found->second.unit;
    const auto dot = p.name.rfind('.');
    const std::string module =
        dot == std::string::npos ? "root" : p.name.substr(0, dot);
    auto* owner = dynamic_cast<nn::Module*>(p.owner);
    FLATSHARD_CHECK(
        owner != nullptr,
        usage,
        "module {} owns parameter {} of unit {} and has no hooks, so nobody "
        "sees whether it is called with its weights; derive it from "
        "flatshard::nn::Module, or leave strict off",
        module,
        p.name,
        units_[unit]->name());
    if (!seen.emplace(p.owner, unit).second) {
      continue;
    }
    module_hooks_.push_back(
        owner->add_forward_pre_hook([weak = weak_from_this(), unit, module](
                                        nn::Module&,
                                        const nn::TensorList&) {
          if (const auto self = weak.lock()) {
            self->on_module_called(unit, module);
          }
        }));
  }
}

void Runtime::on_module_called(UnitId unit, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const bool has_weights = units_[unit]->awaited || units_[unit]->resident();
  const bool in_backward = autograd_task::current_id() >= 0 && has_weights;
  strict_->module_called(unit, name, in_backward);
}

void Runtime::say_next(UnitId next) {
  // After a backward that failed, reductions may still be under way; they use
  // the same communicator.
  executor_.synchronize_reductions();
  compare_next(*mesh_, next, strict_->unit_names(), step_);
}

void Runtime::finish_step() {
  if (!strict_) {
    return;
  }
  // First, so that a rank on which the rest fails does not leave others here.
  say_next(kNoUnit);
  const std::lock_guard lock(mutex_);
  strict_->end_step();
  FLATSHARD_CHECK(
      scheduler_.resting(),
      usage,
      "at the end of step {} these units do not rest: {}; a forward or "
      "backward of theirs has not ended",
      step_,
      fmt::join(scheduler_.restless_units(), ", "));
}

}  // namespace flatshard
