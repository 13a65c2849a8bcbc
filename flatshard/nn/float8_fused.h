#pragma once

#include <tuple>

#include "flatshard/float8/quantize.h"

// What layers hand to FP8 products, quantized where it is computed. On CUDA in
// bfloat16 it never is in memory as bfloat16; elsewhere it is made first, and
// the planes are the same. No autograd here.
namespace flatshard::nn {

/// The row plane and the transposed column plane of one tensor.
struct Float8Planes {
  float8::Plane rows;
  float8::Plane columns;
};

/// Planes of silu(gate) * up [tokens, ffn].
/// @param gate, up   [tokens, ffn] of one dtype; rows may lie apart, as halves
///                   of one tensor do.
/// @param multiple   of the length of the column plane's rows (PlaneOptions).
Float8Planes swiglu_float8(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    std::int64_t multiple = 1);

/// Planes of [dgate | dup] [tokens, 2 ffn], the gradient of one product's
/// result.
Float8Planes swiglu_backward_float8(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    std::int64_t multiple = 1);

/// (silu(gate) * up, its largest magnitude [] float32) in one pass.
std::tuple<at::Tensor, at::Tensor> swiglu_amax(
    const at::Tensor& gate,
    const at::Tensor& up);

/// (dgate, dup, the largest magnitude of both) in one pass.
std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up);

struct NormFloat8 {
  at::Tensor sum;   ///< x + delta [tokens, dim]; x without delta
  at::Tensor rstd;  ///< [tokens] float32, for the backward
  Float8Planes planes;
};

/// Planes of rms_norm(x + delta) (rms_norm.h). Tensorwise: the pass that adds
/// finds amax too.
/// @param delta  [tokens, dim] like x, or undefined
NormFloat8 rms_norm_float8(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const float8::Quantizer& quantizer,
    std::int64_t multiple = 1);

/// rms_norm_rows_backward (rms_norm_rows.h) that finds dx's largest magnitude
/// as well: (dx, dw, amax [] float32).
std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd);

}  // namespace flatshard::nn
