#include "flatshard/core/error.h"
#include "flatshard/float8/cuda_matmul.h"

namespace flatshard::float8::cuda {

void matmul(at::Tensor&, const Operand&, const Operand&, const MatmulOptions&) {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

bool multiplies(Recipe, at::Device) {
  return false;
}

}  // namespace flatshard::float8::cuda
