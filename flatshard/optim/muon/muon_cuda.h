#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard {

// The CUDA parts of Muon; in a build without CUDA they throw Error{config}.

/// As muon_direction, for gradients in float32 or bfloat16.
void muon_direction_cuda(
    const at::Tensor& grad,
    const at::Tensor& grad_scale,
    const at::Tensor& buffer,
    const at::Tensor& direction,
    double momentum,
    bool nesterov);

/// As muon_apply, for float32 `main` and bfloat16 `compute`.
void muon_apply_cuda(
    const at::Tensor& main,
    const at::Tensor& compute,
    const at::Tensor& direction,
    double decay,
    double step);

/// Copies the elements below the diagonal to their mirrored places.
///
/// @param matrix  [rows, rows] contiguous, bfloat16; rows is a multiple of 64.
void mirror_lower_cuda(const at::Tensor& matrix);

/// out = beta * x + left x, without a copy of `x`.
///
/// @param out   the sizes and strides of `x`, other memory.
/// @param left  [rows, rows] contiguous, symmetric.
/// @param x     [rows, columns], contiguous or transposed. All are bfloat16.
void add_matmul_cuda(
    const at::Tensor& out,
    const at::Tensor& left,
    const at::Tensor& x,
    double beta);

}  // namespace flatshard
