#include "flatshard/nn/swiglu.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cuda_ops.h"

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor
  forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    if (cuda::takes(gate)) {
      return cuda::swiglu_forward(gate.contiguous(), up.contiguous());
    }
    return at::silu(gate).mul_(up);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &g = grads[0];
    if (cuda::takes(gate) && !at::GradMode::is_enabled()) {
      const auto [dgate, dup] = cuda::swiglu_backward(
          g.contiguous(),
          gate.contiguous(),
          up.contiguous());
      return {dgate, dup};
    }
    return {at::silu_backward(g * up, gate), g * at::silu(gate)};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  FLATSHARD_CHECK(
      gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      usage,
      "swiglu: expected gate and up of one shape and dtype, got {} and {}",
      c10::str(gate.sizes()),
      c10::str(up.sizes()));
  return SwigluFunction::apply(gate, up);
}

}  // namespace flatshard::nn
