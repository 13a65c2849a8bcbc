#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/grid.h"

/// The functions of quantize.h on the CPU. Tensors are contiguous.
namespace flatshard::float8::cpu {

/// Fills data and scales of `view`, a plane of x.
void quantize(const at::Tensor& x, const Quantizer& q, const PlaneView& view);

/// @param data  bytes [rows, columns]
/// @param out   [rows, columns] float32
void dequantize(
    const at::Tensor& data,
    Format format,
    const ScaleGrid& grid,
    const at::Tensor& scales,
    at::Tensor& out);

float amax_of(const at::Tensor& x);

}  // namespace flatshard::float8::cpu
