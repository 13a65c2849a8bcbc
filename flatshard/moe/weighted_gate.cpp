#include "flatshard/moe/weighted_gate.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/ops/cuda_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

namespace flatshard::nn {
namespace {

// Plain operations make a dozen float tensors of at most this many elements.
constexpr std::int64_t kPlainElements = std::int64_t{1} << 22;

bool has_kernel(const Gate& gate, const at::Tensor& gate_up) {
  return gate.activation != GateActivation::gelu_tanh &&
         cuda::supports(gate_up);
}

// Runs the kernel forward, or with a `dy` backward. `y` may be dy.
void run_gate_kernel(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights,
    const at::Tensor& y,
    const at::Tensor& dy = {},
    const at::Tensor& dgate_up = {},
    const at::Tensor& dweights = {}) {
  const at::Tensor weights = row_weights.contiguous();
  cuda::launch(
      kernels::WeightedGate{
          .gate_up = cuda::rows_in(gate_up),
          .weights = weights.const_data_ptr<float>(),
          .y = cuda::rows_in(y),
          .dy = cuda::rows_in(dy),
          .dgate_up = cuda::rows_in(dgate_up),
          .dweights = cuda::data_of<float>(dweights),
          .rows = gate_up.size(0),
          .dim = gate_up.size(1) / 2,
          .dtype = cuda::dtype_of(gate_up),
          .gate = gate},
      gate_up.device());
}

// Returns a view of the columns of gate, or with 1 of the columns of up.
at::Tensor
half_of(const Gate& gate, const at::Tensor& gate_up, std::int64_t which) {
  const std::int64_t width = gate_up.size(1) / 2;
  return gate.in_turn ? gate_up.unflatten(1, {width, 2}).select(2, which)
                      : gate_up.narrow(1, which * width, width);
}

// Calls fn(rows) for parts of all rows, where rows(t) is this part of t.
template <class F>
void for_each_part(const at::Tensor& gate_up, F&& fn) {
  const std::int64_t all = gate_up.size(0);
  const std::int64_t most = std::max<std::int64_t>(
      1,
      2 * kPlainElements / std::max<std::int64_t>(1, gate_up.size(1)));
  for (std::int64_t begin = 0; begin < all; begin += most) {
    const std::int64_t count = std::min(most, all - begin);
    fn([begin, count](const at::Tensor& t) {
      return t.narrow(0, begin, count);
    });
  }
}

}  // namespace

at::Tensor weighted_gate(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  at::Tensor y =
      at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  if (has_kernel(gate, gate_up)) {
    run_gate_kernel(gate, gate_up, row_weights, y);
    return y;
  }
  for_each_part(gate_up, [&](const auto& rows) {
    rows(y).copy_(
        gated(
            gate.activation,
            half_of(gate, rows(gate_up), 0).to(at::kFloat),
            half_of(gate, rows(gate_up), 1).to(at::kFloat)) *
        rows(row_weights).unsqueeze(1));
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> weighted_gate_backward(
    const Gate& gate,
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& row_weights) {
  const at::Tensor dgate_up = at::empty_like(gate_up);
  const at::Tensor dweights = at::empty_like(row_weights);
  if (has_kernel(gate, gate_up)) {
    run_gate_kernel(gate, gate_up, row_weights, dy, dy, dgate_up, dweights);
    return {dgate_up, dweights, dy};
  }
  for_each_part(gate_up, [&](const auto& rows) {
    const at::Tensor gates = half_of(gate, rows(gate_up), 0).to(at::kFloat);
    const at::Tensor ups = half_of(gate, rows(gate_up), 1).to(at::kFloat);
    const at::Tensor weights = rows(row_weights).unsqueeze(1);
    const at::Tensor g = rows(dy).to(at::kFloat);
    const at::Tensor product = gated(gate.activation, gates, ups);
    rows(dweights).copy_((g * product).sum(1));
    const auto [dgates, dups] =
        gated_gradients(gate.activation, g * weights, gates, ups);
    half_of(gate, rows(dgate_up), 0).copy_(dgates);
    half_of(gate, rows(dgate_up), 1).copy_(dups);
    rows(dy).copy_(product * weights);
  });
  return {dgate_up, dweights, dy};
}

}  // namespace flatshard::nn
