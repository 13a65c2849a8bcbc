#pragma once

#include "flatshard/nn/float8/float8_fused.h"

/// float8_fused.h on CUDA, for bfloat16. Built twice, as cuda_ops.h is.
namespace flatshard::nn::cuda {

/// Returns whether the kernels take rows like these: CUDA, bfloat16, rows
/// divisible by 8 that begin at multiples of 16 bytes.
bool quantizes(const at::Tensor& rows);

/// Returns whether a contiguous tensor begins at a multiple of 16 bytes.
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

/// Makes tensorwise planes of two contiguous tensors side by side, by
/// wanted.amax.
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
