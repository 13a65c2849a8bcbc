#include "flatshard/device/generator_states.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>

namespace flatshard {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_states(const GeneratorStates& states) {
  for (const auto& [shared, state] : states) {
    at::Generator generator = shared;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

std::vector<at::Generator> generators_of(const GeneratorStates& states) {
  std::vector<at::Generator> generators;
  for (const auto& [generator, state] : states) {
    generators.push_back(generator);
  }
  return generators;
}

}  // namespace

GeneratorStates states_of(const std::vector<at::Generator>& generators) {
  GeneratorStates states;
  for (const at::Generator& generator : generators) {
    const bool seen =
        std::any_of(states.begin(), states.end(), [&](const auto& entry) {
          return entry.first == generator;
        });
    if (!seen) {
      states.emplace_back(generator, state_of(generator));
    }
  }
  return states;
}

void keep_moved(GeneratorStates& states) {
  std::erase_if(states, [](const auto& entry) {
    return at::equal(entry.second, state_of(entry.first));
  });
}

RestoreGenerators::~RestoreGenerators() {
  set_states(states_);
}

RestoreGenerators redraw_numbers(const GeneratorStates& states) {
  GeneratorStates before = states_of(generators_of(states));
  set_states(states);
  return RestoreGenerators(std::move(before));
}

}  // namespace flatshard
