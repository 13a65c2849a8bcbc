// Hooks on modules of C++: they report when the forward of a unit starts, ends
// and fails.
#include "flatshard/autograd/explain_dtype.h"
#include "flatshard/nn/module.h"
#include "flatshard/runtime/runtime.h"

#include <algorithm>

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
         module.add_forward_hook(
             [weak, id](
                 nn::Module&,
                 const nn::TensorList&,
                 const nn::TensorList& outputs) {
               if (const auto self = weak.lock()) {
                 self->calls().forward_end(id, outputs);
               }
             },
             /*reads_values=*/false)});
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

}  // namespace flatshard
