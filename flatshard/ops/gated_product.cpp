#include "flatshard/ops/gated_product.h"

#include "flatshard/ops/clamped_silu.h"
#include "flatshard/ops/cuda_ops.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace flatshard::nn {
namespace {

constexpr const char* kTanh = "tanh";

// Source: openai/gpt-oss, gpt_oss/torch/model.py, swiglu.
at::Tensor clamped_product(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor limited = gate.clamp_max(kClampedSiluLimit);
  return limited * (limited * kClampedSiluFactor).sigmoid() *
         (up.clamp(-kClampedSiluLimit, kClampedSiluLimit) + 1);
}

// Returns (dgate, dup) for d, the gradient of the gated value.
std::tuple<at::Tensor, at::Tensor> clamped_backward(
    const at::Tensor& d,
    const at::Tensor& gate,
    const at::Tensor& up) {
  const at::Tensor limited = gate.clamp_max(kClampedSiluLimit);
  const at::Tensor sigmoid = (limited * kClampedSiluFactor).sigmoid();
  const at::Tensor slope =
      sigmoid * (1 + limited * (1 - sigmoid) * kClampedSiluFactor);
  return {
      d * (up.clamp(-kClampedSiluLimit, kClampedSiluLimit) + 1) * slope *
          gate.le(kClampedSiluLimit),
      d * limited * sigmoid * up.abs().le(kClampedSiluLimit)};
}

}  // namespace

at::Tensor gated_product(
    GateActivation activation,
    const at::Tensor& gate,
    const at::Tensor& up) {
  if (activation == GateActivation::gelu_tanh) {
    return at::gelu(gate, kTanh) * up;
  }
  if (activation == GateActivation::clamped_silu) {
    return clamped_product(gate, up);
  }
  if (cuda::supports(gate) && !at::GradMode::is_enabled()) {
    return cuda::swiglu_forward(gate.contiguous(), up.contiguous());
  }
  return at::silu(gate) * up;
}

std::tuple<at::Tensor, at::Tensor> gated_product_backward(
    GateActivation activation,
    const at::Tensor& d,
    const at::Tensor& gate,
    const at::Tensor& up,
    at::Tensor* product) {
  if (activation == GateActivation::gelu_tanh) {
    return {at::gelu_backward(d * up, gate, kTanh), d * at::gelu(gate, kTanh)};
  }
  if (activation == GateActivation::clamped_silu) {
    return clamped_backward(d, gate, up);
  }
  if (!cuda::supports(gate) || at::GradMode::is_enabled()) {
    return {at::silu_backward(d * up, gate), d * at::silu(gate)};
  }
  const at::Tensor dy = d.contiguous();
  if (product != nullptr) {
    *product = dy;
  }
  return cuda::swiglu_backward(dy, gate.contiguous(), up.contiguous(), product);
}

}  // namespace flatshard::nn
