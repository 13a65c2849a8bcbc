#include "flatshard/nn/module_generators.h"

#include "flatshard/nn/module_tree.h"
#include "flatshard/ops/cuda_ops.h"

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
  for (const at::Generator& generator : own_generators(modules_below(owner))) {
    all.push_back(generator);
  }
  return states_of(all);
}

}  // namespace flatshard::nn
