// Hooks on modules of C++: a unit that has one says by them when its forward
// begins, ends and fails.
#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"
#include "flatshard/unit/explain_dtype.h"
#include "flatshard/unit/runtime.h"

#include <set>
#include <utility>

namespace flatshard {

void Runtime::hook_modules() {
  const std::weak_ptr<Runtime> weak = weak_from_this();
  for (const auto& unit : units_) {
    if (unit->module() == nullptr) {
      continue;
    }
    const UnitId id = unit->id();
    nn::Module& module = *unit->module();
    module_hooks_.push_back(module.add_forward_pre_hook(
        [weak, id](nn::Module&, const nn::TensorList& inputs) {
          if (const auto self = weak.lock()) {
            self->calls().forward_begin(id, inputs);
          }
        }));
    module_hooks_.push_back(
        module.add_forward_hook([weak, id](
                                    nn::Module&,
                                    const nn::TensorList&,
                                    const nn::TensorList& outputs) {
          if (const auto self = weak.lock()) {
            self->calls().forward_end(id, outputs);
          }
        }));
    module_hooks_.push_back(module.add_forward_error_hook(
        [weak, id](nn::Module&, std::exception_ptr& error) {
          if (const auto self = weak.lock()) {
            self->calls().forward_error(id);
            explain_dtype(error, id, self->units_, self->events_);
          }
        }));
  }
}

void Runtime::watch_modules() {
  std::vector<std::string> names;
  for (const auto& unit : units_) {
    names.push_back(unit->name());
  }
  strict_ = std::make_unique<StrictChecks>(std::move(names));
  std::set<std::pair<const torch::nn::Module*, UnitId>> seen;
  for (const auto& p : nn::named_parameters(*units_.front()->module())) {
    const ParameterRef* const found = events_.find(p.tensor);
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
  strict_->module_called(
      unit,
      name,
      events_.is_open(unit) || (AutogradEvents::in_backward() &&
                                executor_.has_weights(*units_[unit])));
}

}  // namespace flatshard
