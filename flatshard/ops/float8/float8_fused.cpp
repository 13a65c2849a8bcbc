#include "flatshard/ops/float8/float8_fused.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "flatshard/core/error.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/float8/cuda_float8.h"
#include "flatshard/ops/gated_product.h"
#include "flatshard/ops/rms_norm_rows.h"
#include "flatshard/ops/rows.h"

namespace flatshard::nn {
namespace {

Float8RowsAndColumns planes_of(
    const at::Tensor& values,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted) {
  Float8RowsAndColumns planes{.amax = wanted.amax};
  // An empty tensor has the scales of zeros.
  const bool scaled_as_one =
      float8::traits_of(quantizer.recipe).has_one_scale() && values.numel() > 0;
  if (scaled_as_one && !planes.amax.defined()) {
    planes.amax = float8::amax_of(values);
  }
  const at::Tensor amax = scaled_as_one ? planes.amax : at::Tensor();
  if (wanted.rows && wanted.columns) {
    std::tie(planes.rows, planes.columns) =
        float8::quantize_both(values, quantizer, wanted.multiple, amax);
  } else if (wanted.rows) {
    planes.rows = float8::quantize(values, quantizer, {.amax = amax});
  } else if (wanted.columns) {
    planes.columns = float8::quantize(
        values,
        quantizer,
        {.axis = float8::Axis::column,
         .multiple = wanted.multiple,
         .amax = amax});
  }
  return planes;
}

void check_rows(
    const char* op,
    const at::Tensor& like,
    std::initializer_list<at::Tensor> others) {
  FLATSHARD_CHECK(
      like.dim() == 2,
      usage,
      "{}: expected rows [tokens, dim], got {}",
      op,
      c10::str(like.sizes()));
  for (const at::Tensor& other : others) {
    FLATSHARD_CHECK(
        other.sizes() == like.sizes() &&
            other.scalar_type() == like.scalar_type(),
        usage,
        "{}: expected tensors of one shape and dtype, got {} and {}",
        op,
        c10::str(like.sizes()),
        c10::str(other.sizes()));
  }
}

at::Tensor zero_like(const at::Tensor& t) {
  return at::zeros({}, t.options().dtype(at::kFloat));
}

}  // namespace

Float8RowsAndColumns swiglu_float8(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted) {
  const at::NoGradGuard no_grad;
  check_rows("swiglu_float8", gate, {up});
  // Kernels for activations support e4m3 only.
  if (cuda::quantizes(gate) && cuda::quantizes(up) &&
      quantizer.format == float8::Format::e4m3) {
    return cuda::quantize_swiglu(gate, up, quantizer, wanted);
  }
  return planes_of(
      gated_product(GateActivation::silu, gate, up),
      quantizer,
      wanted);
}

Float8RowsAndColumns swiglu_backward_float8(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted) {
  const at::NoGradGuard no_grad;
  check_rows("swiglu_backward_float8", gate, {up, dy});
  const bool fused =
      cuda::quantizes(gate) && cuda::quantizes(up) && cuda::quantizes(dy);
  if (!float8::traits_of(quantizer.recipe).has_one_scale()) {
    if (fused && quantizer.format == float8::Format::e4m3) {
      return cuda::quantize_swiglu_gradient(dy, gate, up, quantizer, wanted);
    }
    const auto [dgate, dup] =
        gated_product_backward(GateActivation::silu, dy, gate, up);
    return planes_of(at::cat({dgate, dup}, 1), quantizer, wanted);
  }
  // A single scale needs amax first: finding it where the values are stored
  // moves less memory than computing them twice.
  const auto [dgate, dup, amax] = swiglu_backward_amax(dy, gate, up);
  Float8Wanted known = wanted;
  known.amax = amax.amax();
  return fused ? cuda::quantize_side_by_side(dgate, dup, quantizer, known)
               : planes_of(at::cat({dgate, dup}, 1), quantizer, known);
}

std::tuple<at::Tensor, at::Tensor> swiglu_amax(
    const at::Tensor& gate,
    const at::Tensor& up) {
  const at::NoGradGuard no_grad;
  if (cuda::supports(gate)) {
    const at::Tensor amax = zero_like(gate);
    const at::Tensor y =
        cuda::swiglu_forward(gate.contiguous(), up.contiguous(), amax);
    return {y, amax};
  }
  const at::Tensor y = gated_product(GateActivation::silu, gate, up);
  return {y, float8::amax_of(y)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    bool gives_up_dy) {
  const at::NoGradGuard no_grad;
  if (cuda::supports(gate)) {
    const at::Tensor amax = at::zeros({2}, gate.options().dtype(at::kFloat));
    const auto [dgate, dup] = cuda::swiglu_backward(
        dy.contiguous(),
        gate.contiguous(),
        up.contiguous(),
        nullptr,
        amax,
        gives_up_dy);
    return {dgate, dup, amax};
  }
  const auto [dgate, dup] =
      gated_product_backward(GateActivation::silu, dy, gate, up);
  return {
      dgate,
      dup,
      at::stack({float8::amax_of(dgate), float8::amax_of(dup)})};
}

NormFloat8 rms_norm_float8(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted) {
  const at::NoGradGuard no_grad;
  check_norm_input(x, delta, weight);
  const at::Tensor rows = x.contiguous();
  check_rows("rms_norm_float8", rows, {});
  // A weight is a separate row.
  if (!cuda::quantizes(rows) || quantizer.format != float8::Format::e4m3 ||
      !cuda::is_aligned(weight)) {
    const auto [y, sum, rstd] = rms_norm_rows(rows, delta, weight, eps);
    return {sum.defined() ? sum : rows, rstd, planes_of(y, quantizer, wanted)};
  }
  const at::Tensor w = weight.contiguous();
  Float8Wanted known = wanted;
  if (float8::traits_of(quantizer.recipe).has_one_scale()) {
    known.amax = zero_like(rows);
  }
  const auto [y, sum, rstd] = cuda::rms_norm_forward(
      rows,
      delta.defined() ? delta.contiguous() : delta,
      w,
      eps,
      {.store_y = false, .amax = known.amax});
  const at::Tensor normed = sum.defined() ? sum : rows;
  return {normed, rstd, cuda::quantize_norm(normed, rstd, w, quantizer, known)};
}

Float8RowsAndColumns rms_norm_float8_again(
    const at::Tensor& sum,
    const at::Tensor& rstd,
    const at::Tensor& weight,
    const float8::Quantizer& quantizer,
    const Float8Wanted& wanted) {
  const at::NoGradGuard no_grad;
  check_norm_input(sum, {}, weight);
  const at::Tensor rows = sum.contiguous();
  check_rows("rms_norm_float8_again", rows, {});
  if (cuda::quantizes(rows) && quantizer.format == float8::Format::e4m3 &&
      cuda::is_aligned(weight)) {
    return cuda::quantize_norm(rows, rstd, weight, quantizer, wanted);
  }
  return planes_of(normed_rows(rows, weight, rstd), quantizer, wanted);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_backward_amax(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd) {
  const at::NoGradGuard no_grad;
  if (cuda::supports(x)) {
    const at::Tensor amax = zero_like(x);
    const auto [dx, dw] = cuda::rms_norm_backward(
        dy.contiguous(),
        dsum.defined() ? dsum.contiguous() : dsum,
        x.contiguous(),
        weight.contiguous(),
        rstd,
        nullptr,
        amax);
    return {dx, dw, amax};
  }
  const auto [dx, dw] = rms_norm_rows_backward(dy, dsum, x, weight, rstd);
  return {dx, dw, float8::amax_of(dx)};
}

}  // namespace flatshard::nn
