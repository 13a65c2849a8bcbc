#pragma once

#include "flatshard/ops/float8/float8_fused.h"

/// float8_fused.h on CUDA, for bfloat16. Built twice, as cuda_ops.h is.
namespace flatshard::nn::cuda {

/// Returns whether the kernels support these rows: CUDA, bfloat16, row sizes
/// divisible by 8, and rows that start at multiples of 16 bytes.
bool quantizes(const at::Tensor& rows);

/// Returns whether a contiguous tensor starts at a multiple of 16 bytes.
bool is_aligned(const at::Tensor& tensor);

Float8RowsAndColumns quantize_swiglu(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted);

Float8RowsAndColumns quantize_swiglu_gradient(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted);

/// Quantizes two contiguous tensors side by side into tensorwise planes, with
/// the scale of `wanted.amax`.
Float8RowsAndColumns quantize_side_by_side(
    const at::Tensor& left,
    const at::Tensor& right,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted);

Float8RowsAndColumns quantize_norm(
    const at::Tensor& x,
    const at::Tensor& rstd,
    const at::Tensor& weight,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted);

}  // namespace flatshard::nn::cuda
