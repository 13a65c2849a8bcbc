#include "flatshard/nn/module_tree.h"

#include <algorithm>

namespace flatshard::nn {

std::vector<Module*> modules_below(Module& root) {
  std::vector<Module*> found;
  for (const auto& module : root.modules()) {
    if (auto* ours = dynamic_cast<Module*>(module.get())) {
      found.push_back(ours);
    }
  }
  return found;
}

std::vector<at::Generator> own_generators(const std::vector<Module*>& modules) {
  std::vector<at::Generator> found;
  for (const Module* module : modules) {
    for (const at::Generator& generator : module->own_generators()) {
      if (std::find(found.begin(), found.end(), generator) == found.end()) {
        found.push_back(generator);
      }
    }
  }
  return found;
}

}  // namespace flatshard::nn
