#pragma once

#include "flatshard/nn/linear.h"
#include "flatshard/nn/rms_norm.h"

#include <vector>

namespace flatshard::nn {

struct NormLinears {
  at::Tensor sum;                ///< [..., dim], to go on with
  std::vector<at::Tensor> outs;  ///< one [..., out_i] per layer
};

/// linears(norm(x + delta), layers), which keeps its input for backward and not
/// what it normalized: the norm's backward writes that once more, bit for bit,
/// over the gradient that it has read. Costs one write of [..., dim] and saves
/// as much memory from here to the backward. Norms and layers with hooks behind
/// their forward, layers of which only some have a bias, and column-parallel
/// layers, which gather what was normalized, are called one by one instead.
///
/// @param x      [..., dim]
/// @param delta  like x, or undefined: then sum is x, and no copy of it. Go on
///               with sum, not with x; see add_rms_norm.
/// @param layers  hooks before their forward see x.
NormLinears norm_linears(
    const at::Tensor& x,
    const at::Tensor& delta,
    RmsNormImpl& norm,
    const std::vector<LinearImpl*>& layers);

}  // namespace flatshard::nn
