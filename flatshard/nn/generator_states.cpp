#include "flatshard/nn/generator_states.h"

#include "flatshard/nn/cuda_ops.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace flatshard::nn {
namespace {

at::Tensor state_of(const at::Generator& generator) {
  at::Generator g = generator;
  const std::lock_guard lock(g.mutex());
  return g.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

GeneratorStates generator_states(Module& owner, const TensorList& inputs) {
  GeneratorStates states;
  const auto add = [&](const at::Generator& generator) {
    for (const auto& [seen, state] : states) {
      if (seen == generator) {
        return;
      }
    }
    states.emplace_back(generator, state_of(generator));
  };
  add(at::detail::getDefaultCPUGenerator());
  for (const at::Tensor& input : inputs) {
    if (const auto generator = cuda::default_generator(input.device())) {
      add(*generator);
    }
  }
  for (const auto& module : owner.modules()) {
    if (const auto* ours = dynamic_cast<const Module*>(module.get())) {
      for (const at::Generator& generator : ours->own_generators()) {
        add(generator);
      }
    }
  }
  return states;
}

void keep_moved(GeneratorStates& states) {
  std::erase_if(states, [](const auto& entry) {
    return at::equal(entry.second, state_of(entry.first));
  });
}

DrawAgain::DrawAgain(const GeneratorStates& states) {
  for (const auto& [generator, state] : states) {
    before_.emplace_back(generator, state_of(generator));
    set_state(generator, state);
  }
}

DrawAgain::~DrawAgain() {
  for (const auto& [generator, state] : before_) {
    set_state(generator, state);
  }
}

}  // namespace flatshard::nn
