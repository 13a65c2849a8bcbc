#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace flatshard::nn {

// The common part of the layers around RMSNorm: its two passes on any device.

/// @param delta  may be undefined.
/// @throws Error{usage} for shapes and dtypes that do not fit.
void check_norm_input(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight);

/// @param x, delta  [..., dim], delta may be undefined.
/// @return (y, sum = x + delta, rstd float32 [rows]) as [rows, dim]; sum is
///   undefined without delta.
std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_rows(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps);

/// @param dsum  added to dx, may be undefined.
/// @param x     what was normalized, sum where there was one.
/// @param y     when given, becomes rms_norm_rows' y again, bit for bit; may be
///              in dy's memory and then overwrites it.
/// @param wants_weight  of a frozen weight: false.
/// @return (dx [rows, dim], dw for deliver_norm_wgrad, defined with
///   wants_weight)
std::tuple<at::Tensor, at::Tensor> rms_norm_rows_backward(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    at::Tensor* y = nullptr,
    bool wants_weight = true);

/// rms_norm_rows' y again, bit for bit, of what was normalized.
at::Tensor normed_rows(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd);

}  // namespace flatshard::nn
