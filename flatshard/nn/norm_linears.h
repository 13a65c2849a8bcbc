#pragma once

#include "flatshard/nn/linear.h"
#include "flatshard/nn/rms_norm.h"

#include <vector>

namespace flatshard::nn {

struct NormLinears {
  at::Tensor sum;                ///< [..., dim], to continue with
  std::vector<at::Tensor> outs;  ///< one [..., out_i] per layer
};

/// Computes linears(norm(x + delta), layers) and keeps its input for backward,
/// not the normalized values: the norm's backward writes those once more, bit
/// for bit, over the gradient that it has read. Costs one write of [..., dim]
/// and saves as much memory from here to the backward. The norm and layers are
/// called one by one if they have hooks after their forward, or if only some
/// layers have a bias. So are column-parallel layers, because they all-gather
/// the normalized values.
///
/// @param x      [..., dim]
/// @param delta  like x, or undefined: then sum is x, and no copy of it.
///               Continue with sum, not with x; see add_rms_norm.
/// @param layers  hooks before their forward see x.
NormLinears norm_linears(
    const at::Tensor& x,
    const at::Tensor& delta,
    RmsNormImpl& norm,
    const std::vector<LinearImpl*>& layers);

}  // namespace flatshard::nn
