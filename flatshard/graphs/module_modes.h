#pragma once

#include "flatshard/nn/module.h"

#include <vector>

namespace flatshard {

/// train() or eval() of each of `modules`.
std::vector<bool> modes_of(const std::vector<nn::Module*>& modules);

/// Called in each forward, so it allocates no memory.
bool has_modes(
    const std::vector<nn::Module*>& modules,
    const std::vector<bool>& modes);

/// While it exists, `modules` are in `modes`.
class ModesScope {
 public:
  /// @param modules  parents before the modules inside them; outlive this.
  ModesScope(
      const std::vector<nn::Module*>& modules,
      const std::vector<bool>& modes);
  ~ModesScope();
  ModesScope(const ModesScope&) = delete;
  ModesScope& operator=(const ModesScope&) = delete;

 private:
  static void set(
      const std::vector<nn::Module*>& modules,
      const std::vector<bool>& modes);

  const std::vector<nn::Module*>& modules_;
  std::vector<bool> before_;
};

}  // namespace flatshard
