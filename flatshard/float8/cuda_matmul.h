#pragma once

#include "flatshard/float8/float8_matmul.h"

/// float8_matmul.h on CUDA, by cuBLASLt. Built twice, as cuda_float8_ops.h is.
namespace flatshard::float8::cuda {

void matmul(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options);

bool multiplies(Recipe recipe, at::Device device);

}  // namespace flatshard::float8::cuda
