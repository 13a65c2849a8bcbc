#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/grid.h"

/// The functions of quantize.h on CUDA. Built twice: cuda_float8_ops.cpp with
/// CUDA, no_cuda_float8_ops.cpp without, where the functions throw
/// Error{config}. Tensors are contiguous and on one GPU; work goes to the
/// current stream, and nothing blocks the host.
namespace flatshard::float8::cuda {

/// Fills one plane or both; the other one is null then.
void quantize(
    const at::Tensor& x,
    const Quantizer& q,
    const PlaneView* row,
    const PlaneView* column);

/// Returns whether `requantize` has a kernel for them.
bool requantizes(const Plane& rows, const Quantizer& q);
/// See requantize_into.
void requantize(const Plane& rows, const Quantizer& q, const PlaneView& column);

void dequantize(
    const at::Tensor& data,
    Format format,
    const ScaleGrid& grid,
    const at::Tensor& scales,
    at::Tensor& out);

at::Tensor amax_of(const at::Tensor& x);
void transpose_bytes(const at::Tensor& data, at::Tensor& out);
void swizzle_mx_scales(const at::Tensor& scales, at::Tensor& out);

}  // namespace flatshard::float8::cuda
