#pragma once

#include "flatshard/float8/matmul.h"

/// matmul.h on CUDA, by cuBLASLt. Built twice, as cuda_ops.h is.
namespace flatshard::float8::cuda {

void matmul(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options);

bool multiplies(Recipe recipe, at::Device device);

}  // namespace flatshard::float8::cuda
