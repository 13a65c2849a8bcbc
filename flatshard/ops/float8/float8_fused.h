#pragma once

#include <tuple>

#include "flatshard/float8/quantize.h"

// Inputs of FP8 matmuls, quantized where they are computed. On CUDA in bfloat16
// the input is never stored as bfloat16. Elsewhere it is computed first, and
// the planes are the same. No autograd here.
namespace flatshard::nn {

/// The row plane and the transposed column plane of one tensor, if they were
/// requested.
struct Float8RowsAndColumns {
  float8::Plane rows;
  float8::Plane columns;
  at::Tensor amax;  ///< tensorwise: [] float32, what both are scaled by
};

struct Float8Wanted {
  bool rows = true;
  bool columns = true;
  /// The divisor of the length of the column plane's rows (PlaneOptions).
  std::int64_t multiple = 1;
  at::Tensor amax;  ///< tensorwise: of these values, when it is known
};

/// Returns the planes of silu(gate) * up [tokens, ffn].
/// @param gate, up   [tokens, ffn] of one dtype; rows may have gaps, as in
///                   halves of one tensor.
Float8RowsAndColumns swiglu_float8(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted = {});

/// Returns the planes of [dgate | dup] [tokens, 2 ffn], the gradient of the
/// result of one matmul.
Float8RowsAndColumns swiglu_backward_float8(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted = {});

/// (silu(gate) * up, its largest magnitude [] float32) in one pass.
std::tuple<at::Tensor, at::Tensor> swiglu_amax(
    const at::Tensor& gate,
    const at::Tensor& up);

/// (dgate, dup, the largest magnitude of each [2] float32) in one pass.
/// @param gives_up_dy  dgate may be written over dy.
std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    bool gives_up_dy = false);

struct NormFloat8 {
  at::Tensor sum;   ///< x + delta [tokens, dim]; x without delta
  at::Tensor rstd;  ///< [tokens] float32, for the backward
  Float8RowsAndColumns planes;
};

/// Returns the planes of rms_norm(x + delta) (rms_norm.h). Tensorwise: the pass
/// that adds finds amax too.
/// @param delta  [tokens, dim] like x, or undefined
NormFloat8 rms_norm_float8(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted = {});

/// Does the same in the backward, for the normalized values that `sum` and
/// `rstd` define. The bytes equal the bytes of the forward.
Float8RowsAndColumns rms_norm_float8_again(
    const at::Tensor& sum,
    const at::Tensor& rstd,
    const at::Tensor& weight,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted = {});

/// rms_norm_rows_backward (rms_norm_rows.h) that finds dx's largest magnitude
/// as well: (dx, dw, amax [] float32).
std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd);

}  // namespace flatshard::nn
