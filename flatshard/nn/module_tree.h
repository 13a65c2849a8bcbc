#pragma once

#include "flatshard/nn/module.h"

#include <vector>

namespace flatshard::nn {

/// Returns `root` and the nn::Modules inside it, parents first.
std::vector<Module*> modules_below(Module& root);

/// Returns the generators of these modules in addition to default ones, each
/// once: Module::own_generators.
std::vector<at::Generator> own_generators(const std::vector<Module*>& modules);

}  // namespace flatshard::nn
