#pragma once

#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/ops/matmul_rows.h"

#include <optional>
#include <utility>

namespace flatshard::nn {

// The matmuls that layers with a weight [out, in] have in common.

/// @throws Error{usage} when x is not [..., in] or has another dtype, or when
/// the weight has no memory.
void check_linear_input(const at::Tensor& x, const at::Tensor& weight);

// The matmuls of layers. A weight that `context`'s WeightSource stores in FP8
// is multiplied in FP8: the other operand is quantized by the weight's recipe,
// sums are float32, biases and residuals are added in the rows' dtype.

/// x W^T (+ bias) (+ residual), added inside the matmul.
///
/// @param x         [rows, in]
/// @param bias      [out] or undefined
/// @param residual  [rows, out] or undefined
/// @param context   of the module that owns the weight; may be null.
/// @return          [rows, out]
at::Tensor matmul_forward(
    const MatmulRows& x,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    const at::Tensor& bias = {},
    const at::Tensor& residual = {});

/// y += x W^T in place, inside the matmul.
///
/// @param y  [rows, out]
void add_matmul(
    at::Tensor& y,
    const MatmulRows& x,
    const at::Tensor& weight,
    const ModuleContextPtr& context);

/// dx += g W. An undefined dx is set. Differentiable when gradient mode is on.
/// FP8 weights do not support gradient mode.
///
/// @param g  [rows, out]
void add_input_gradient(
    at::Tensor& dx,
    const MatmulRows& g,
    const at::Tensor& weight,
    const ModuleContextPtr& context);

/// Hands g^T x to the sink of `context`; see deliver_wgrad.
///
/// @param g  [rows, out]
/// @param x  [rows, in]
at::Tensor deliver_matmul_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const MatmulRows& g,
    const MatmulRows& x);

/// grad = g^T x, or grad += g^T x. A float32 gradient of 16-bit rows on a GPU
/// is not rounded to 16 bits before.
///
/// @param grad    [out, in], any dtype
/// @param recipe  of the weight's FP8; absent: it is not FP8.
void write_matmul_wgrad(
    at::Tensor& grad,
    bool accumulate,
    const std::optional<float8::Recipe>& recipe,
    const MatmulRows& g,
    const MatmulRows& x);

/// Returns the FP8 recipe that all these weights share; absent: some are not
/// FP8, or the recipes differ.
/// @param contexts  by weight; may be null.
std::optional<float8::Recipe> common_recipe(
    at::ArrayRef<at::Tensor> weights,
    at::ArrayRef<ModuleContextPtr> contexts);

/// Returns whether the weight's matmuls run in FP8.
/// @param context  may be null.
bool is_float8(const at::Tensor& weight, const ModuleContextPtr& context);

/// Returns the gradient of a result, as [rows, out]. For the result of a
/// row-parallel layer it is all-gathered from all ranks. If splitting the
/// matmul is worth it, the gradient of the layer's input is computed with it.
///
/// @param ranks  null: grad has all rows.
/// @param grad   [..., out]
/// @param dx     set to grad W, or left undefined; null: not needed.
at::Tensor gathered_gradient(
    const TensorParallelPtr& ranks,
    const at::Tensor& grad,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    at::Tensor* dx);

/// Returns a gradient for the functions above.
/// @param both  of them.
inline MatmulRows gradient_rows(at::Tensor g, bool both) {
  return MatmulRows(std::move(g), MatmulRows::Kind::gradient, both);
}

/// Returns the forward's input once more.
/// @param amax  the forward's MatmulRows::amax.
inline MatmulRows activation_rows(at::Tensor x, at::Tensor amax) {
  return MatmulRows(
      std::move(x),
      MatmulRows::Kind::activation,
      /*both=*/false,
      std::move(amax));
}

}  // namespace flatshard::nn
