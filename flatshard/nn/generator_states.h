#pragma once

#include "flatshard/nn/module.h"

#include <ATen/core/Generator.h>

#include <utility>
#include <vector>

namespace flatshard::nn {

/// Generators and where each of them was.
using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

/// Of everything that a part of `owner` may draw from: the default generators
/// of the CPU and of the inputs' devices, and the explicit ones below `owner`.
GeneratorStates generator_states(Module& owner, const TensorList& inputs);

/// Drops the generators that were not moved since: nothing to draw again there,
/// and a default one is shared with other threads.
void keep_moved(GeneratorStates& states);

/// Sets generators back to `states` and, when it ends, to where they had been.
class DrawAgain {
 public:
  explicit DrawAgain(const GeneratorStates& states);
  DrawAgain(const DrawAgain&) = delete;
  DrawAgain& operator=(const DrawAgain&) = delete;
  ~DrawAgain();

 private:
  GeneratorStates before_;
};

}  // namespace flatshard::nn
