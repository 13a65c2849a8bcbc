#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace flatshard {

/// Generators and where each of them was.
using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

/// Returns where they are now, each once.
GeneratorStates states_of(const std::vector<at::Generator>& generators);

/// Drops the generators that were not moved since: nothing to draw again there,
/// and a default one is shared with other threads.
void keep_moved(GeneratorStates& states);

/// When it ends, sets generators back to `states`.
class RestoreGenerators {
 public:
  explicit RestoreGenerators(GeneratorStates states)
      : states_(std::move(states)) {}
  RestoreGenerators(const RestoreGenerators&) = delete;
  RestoreGenerators& operator=(const RestoreGenerators&) = delete;
  ~RestoreGenerators();

 private:
  GeneratorStates states_;
};

/// Sets generators back to `states`. @return what sets them to where they had
/// been, when it ends.
[[nodiscard]] RestoreGenerators redraw_numbers(const GeneratorStates& states);

}  // namespace flatshard
