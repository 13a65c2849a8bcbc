// Hooks on modules of C++: a unit that has one says by them when its forward
// begins, ends and fails.
#include "flatshard/autograd/explain_dtype.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/module.h"
#include "flatshard/runtime/runtime.h"

#include <algorithm>
#include <set>
#include <utility>

namespace flatshard {

void Runtime::hook_modules(const std::shared_ptr<Runtime>& runtime) {
  const std::weak_ptr<Runtime> weak = runtime;
  auto& hooks = runtime->module_hooks_;
  for (const auto& unit : runtime->units()) {
    if (unit->module() == nullptr) {
      continue;
    }
    const UnitId id = unit->id();
    nn::Module& module = *unit->module();
    hooks.push_back(
        {&module,
         module.add_forward_pre_hook(
             [weak, id](nn::Module&, const nn::TensorList& inputs) {
               if (const auto self = weak.lock()) {
                 self->calls().forward_begin(id, inputs);
               }
             })});
    hooks.push_back(
        {&module,
         module.add_forward_hook([weak, id](
                                     nn::Module&,
                                     const nn::TensorList&,
                                     const nn::TensorList& outputs) {
           if (const auto self = weak.lock()) {
             self->calls().forward_end(id, outputs);
           }
         })});
    hooks.push_back(
        {&module,
         module.add_forward_error_hook(
             [weak, id](nn::Module&, std::exception_ptr& error) {
               if (const auto self = weak.lock()) {
                 self->calls().forward_error(id);
                 explain_dtype(error, id, self->units(), self->core_.events);
               }
             })});
  }
}

std::size_t Runtime::num_hooks_on(const nn::Module& module) const {
  return std::ranges::count(module_hooks_, &module, &ModuleHook::module);
}

void Runtime::watch_modules(const std::shared_ptr<Runtime>& runtime) {
  RuntimeCore& core = runtime->core_;
  std::vector<std::string> names;
  for (const auto& unit : core.units) {
    names.push_back(unit->name());
  }
  core.strict = std::make_unique<StrictChecks>(std::move(names));
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
        "module {} owns parameter {} of unit {} and has no hooks, so nobody "
        "sees whether it is called with its weights; derive it from "
        "flatshard::nn::Module, or leave strict off",
        module,
        p.name,
        core.units[unit]->name());
    if (!seen.emplace(p.owner, unit).second) {
      continue;
    }
    runtime->module_hooks_.push_back(
        {owner,
         owner->add_forward_pre_hook(
             [weak = std::weak_ptr(runtime),
              unit,
              module](nn::Module&, const nn::TensorList&) {
               if (const auto self = weak.lock()) {
                 self->on_module_called(unit, module);
               }
             })});
  }
}

void Runtime::on_module_called(UnitId unit, const std::string& name) {
  const std::lock_guard lock(core_.mutex);
  core_.strict->module_called(
      unit,
      name,
      core_.events.is_open(unit) ||
          (AutogradEvents::in_backward() &&
           core_.executor.has_weights(*core_.units[unit])));
}

}  // namespace flatshard
