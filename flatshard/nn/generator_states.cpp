#include "flatshard/nn/generator_states.h"

#include "flatshard/nn/cuda_ops.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace flatshard::nn {

GeneratorStates generator_states(Module& owner, const TensorList& inputs) {
  std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
  for (const at::Tensor& input : inputs) {
    if (const auto generator = cuda::default_generator(input.device())) {
      all.push_back(*generator);
    }
  }
  for (const auto& module : owner.modules()) {
    if (const auto* ours = dynamic_cast<const Module*>(module.get())) {
      for (const at::Generator& generator : ours->own_generators()) {
        all.push_back(generator);
      }
    }
  }
  return states_of(all);
}

}  // namespace flatshard::nn
