#include "flatshard/graphs/module_modes.h"

namespace flatshard {

std::vector<bool> modes_of(const std::vector<nn::Module*>& modules) {
  std::vector<bool> modes;
  for (const nn::Module* module : modules) {
    modes.push_back(module->is_training());
  }
  return modes;
}

bool has_modes(
    const std::vector<nn::Module*>& modules,
    const std::vector<bool>& modes) {
  if (modes.size() != modules.size()) {
    return false;
  }
  for (std::size_t i = 0; i < modules.size(); ++i) {
    if (modules[i]->is_training() != modes[i]) {
      return false;
    }
  }
  return true;
}

ModesScope::ModesScope(
    const std::vector<nn::Module*>& modules,
    const std::vector<bool>& modes)
    : modules_(modules), before_(modes_of(modules)) {
  set(modules_, modes);
}

ModesScope::~ModesScope() {
  set(modules_, before_);
}

void ModesScope::set(
    const std::vector<nn::Module*>& modules,
    const std::vector<bool>& modes) {
  if (has_modes(modules, modes)) {
    return;
  }
  for (std::size_t i = 0; i < modules.size(); ++i) {
    modules[i]->train(modes[i]);  // also children; they follow later
  }
}

}  // namespace flatshard
