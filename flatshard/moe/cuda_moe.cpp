#include "flatshard/moe/cuda_moe.h"

#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/moe/kernels/moe.h"
#include "flatshard/nn/cuda_ops.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/native/cuda/GroupMM.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace flatshard::nn::cuda {
namespace {

kernels::Dtype row_dtype(const at::Tensor& tensor) {
  FLATSHARD_CHECK(
      tensor.is_cuda() && tensor.is_contiguous() &&
          (tensor.scalar_type() == at::kFloat ||
           tensor.scalar_type() == at::kBFloat16),
      internal,
      "expected a contiguous float32 or bfloat16 CUDA tensor, got {}",
      tensor.toString());
  return tensor.scalar_type() == at::kFloat ? kernels::Dtype::f32
                                            : kernels::Dtype::bf16;
}

const void* pointer(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return nullptr;
  }
  row_dtype(tensor);
  return tensor.const_data_ptr();
}

cudaStream_t moe_stream() {
  return at::cuda::getCurrentCUDAStream().stream();
}

void check_experts(std::int64_t num_experts) {
  FLATSHARD_CHECK(
      num_experts <= kernels::kMaxExperts,
      config,
      "num_experts: the CUDA kernels take at most {}, got {}",
      kernels::kMaxExperts,
      num_experts);
}

bool begins_aligned(const at::Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

kernels::ExpertBiases expert_biases(
    const at::Tensor& bias,
    const at::Tensor& ends,
    std::int64_t per_expert,
    const at::Tensor& rows) {
  return {
      .bias = pointer(bias),
      .ends = ends.const_data_ptr<std::int32_t>(),
      .num_groups = static_cast<int>(ends.size(0)),
      .per_expert = static_cast<int>(per_expert),
      .rows = rows.mutable_data_ptr(),
      .factors = nullptr,
      .dots = nullptr,
      .num_rows = rows.size(0),
      .dim = rows.size(1),
      .dtype = row_dtype(rows)};
}

}  // namespace

void router_forward(const RouterForward& args) {
  check_experts(args.rule.num_experts);
  FLATSHARD_CHECK(
      args.rule.groups <= kernels::kMaxRouterGroups,
      config,
      "router_groups: the CUDA kernel takes at most {}, got {}",
      kernels::kMaxRouterGroups,
      args.rule.groups);
  kernels::router_forward(args, moe_stream());
  check_kernel_launch();
}

void router_backward(const RouterBackward& args) {
  check_experts(args.rule.num_experts);
  kernels::router_backward(args, moe_stream());
  check_kernel_launch();
}

at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts) {
  check_experts(num_experts);
  const c10::cuda::CUDAGuard guard(experts.device());
  const at::Tensor all = experts.contiguous();
  at::Tensor counts = at::empty({num_experts}, all.options());
  C10_CUDA_CHECK(cudaMemsetAsync(
      counts.mutable_data_ptr(),
      0,
      counts.nbytes(),
      moe_stream()));
  kernels::count_experts(
      all.const_data_ptr<std::int32_t>(),
      all.numel(),
      num_experts,
      counts.mutable_data_ptr<std::int32_t>(),
      moe_stream());
  check_kernel_launch();
  return counts;
}

std::tuple<at::Tensor, at::Tensor> sort_by_expert(
    const at::Tensor& experts,
    const at::Tensor& counts) {
  check_experts(counts.size(0));
  const c10::cuda::CUDAGuard guard(experts.device());
  const std::int64_t pairs = experts.size(0);
  const std::int64_t blocks =
      (pairs + kernels::kSortPairs - 1) / kernels::kSortPairs;
  at::Tensor bases = at::empty({blocks, counts.size(0) + 1}, experts.options());
  at::Tensor order = at::empty_like(experts);
  at::Tensor inverse = at::empty_like(experts);
  kernels::sort_by_expert(
      {.experts = experts.const_data_ptr<std::int32_t>(),
       .counts = counts.const_data_ptr<std::int32_t>(),
       .bases = bases.mutable_data_ptr<std::int32_t>(),
       .order = order.mutable_data_ptr<std::int32_t>(),
       .inverse = inverse.mutable_data_ptr<std::int32_t>(),
       .pairs = pairs,
       .num_experts = counts.size(0)},
      moe_stream());
  check_kernel_launch();
  return {order, inverse};
}

void permute_rows(
    const at::Tensor& x,
    const at::Tensor& order,
    const at::Tensor& of_rows,
    std::int64_t per_token,
    std::int64_t num_rows,
    const at::Tensor& out,
    const at::Tensor& staying) {
  const c10::cuda::CUDAGuard guard(x.device());
  kernels::permute_rows(
      {.x = pointer(x),
       .order = order.const_data_ptr<std::int32_t>(),
       .places =
           of_rows.defined() ? of_rows.const_data_ptr<std::int32_t>() : nullptr,
       .out = out.mutable_data_ptr(),
       .staying = staying.defined() ? staying.mutable_data_ptr() : nullptr,
       .rows = num_rows,
       .dim = x.size(1),
       .per_token = per_token,
       .dtype = row_dtype(x)},
      moe_stream());
  check_kernel_launch();
}

void sum_rows(
    const at::Tensor& rows,
    const at::Tensor& staying,
    const at::Tensor& places,
    const at::Tensor& addend,
    const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(rows.device());
  kernels::sum_rows(
      {.rows = pointer(rows),
       .staying = pointer(staying),
       .places = places.const_data_ptr<std::int32_t>(),
       .addend = pointer(addend),
       .out = out.mutable_data_ptr(),
       .tokens = places.size(0),
       .slots = places.size(1),
       .dim = rows.size(1),
       .dtype = row_dtype(rows)},
      moe_stream());
  check_kernel_launch();
}

void row_places(
    const at::Tensor& order,
    const at::Tensor& runs,
    std::int64_t num_rows,
    at::Tensor& of_rows,
    at::Tensor& of_pairs) {
  const c10::cuda::CUDAGuard guard(order.device());
  kernels::row_places(
      {.order = order.const_data_ptr<std::int32_t>(),
       .runs = runs.const_data_ptr<std::int32_t>(),
       .of_rows = of_rows.mutable_data_ptr<std::int32_t>(),
       .of_pairs = of_pairs.mutable_data_ptr<std::int32_t>(),
       .num_runs = static_cast<int>(runs.size(1) - 1),
       .num_rows = num_rows,
       .rows = order.size(0)},
      moe_stream());
  check_kernel_launch();
}

bool has_gate_kernel(const Gate& gate, const at::Tensor& gate_up) {
  return gate.activation != GateActivation::gelu_tanh && supports(gate_up);
}

void weighted_gate_forward(
    const Gate& gate,
    const at::Tensor& gate_up,
    const at::Tensor& weights,
    at::Tensor& y) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  const at::Tensor row_weights = weights.contiguous();
  kernels::weighted_gate_forward(
      {.dy = nullptr,
       .gate_up = pointer(gate_up),
       .weights = row_weights.const_data_ptr<float>(),
       .y = y.mutable_data_ptr(),
       .dgate_up = nullptr,
       .dweights = nullptr,
       .rows = gate_up.size(0),
       .dim = gate_up.size(1) / 2,
       .dtype = row_dtype(gate_up),
       .gate = gate},
      moe_stream());
  check_kernel_launch();
}

void weighted_gate_backward(
    const Gate& gate,
    const at::Tensor& dy,
    const at::Tensor& gate_up,
    const at::Tensor& weights,
    at::Tensor& dgate_up,
    at::Tensor& dweights,
    at::Tensor& product) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  const at::Tensor row_weights = weights.contiguous();
  kernels::weighted_gate_backward(
      {.dy = pointer(dy),
       .gate_up = pointer(gate_up),
       .weights = row_weights.const_data_ptr<float>(),
       .y = product.mutable_data_ptr(),
       .dgate_up = dgate_up.mutable_data_ptr(),
       .dweights = dweights.mutable_data_ptr<float>(),
       .rows = gate_up.size(0),
       .dim = gate_up.size(1) / 2,
       .dtype = row_dtype(gate_up),
       .gate = gate},
      moe_stream());
  check_kernel_launch();
}

void add_expert_biases(
    const at::Tensor& bias,
    const at::Tensor& ends,
    std::int64_t per_expert,
    const at::Tensor& factors,
    const at::Tensor& rows) {
  const c10::cuda::CUDAGuard guard(rows.device());
  const at::Tensor values = bias.contiguous();
  const at::Tensor device_ends = ends.to(rows.device()).contiguous();
  const at::Tensor row_factors =
      factors.defined() ? factors.contiguous() : factors;
  kernels::ExpertBiases args =
      expert_biases(values, device_ends, per_expert, rows);
  args.factors =
      factors.defined() ? row_factors.const_data_ptr<float>() : nullptr;
  kernels::add_expert_biases(args, moe_stream());
  check_kernel_launch();
}

void add_expert_bias_dots(
    const at::Tensor& bias,
    const at::Tensor& ends,
    std::int64_t per_expert,
    const at::Tensor& rows,
    const at::Tensor& dots) {
  const c10::cuda::CUDAGuard guard(rows.device());
  const at::Tensor values = bias.contiguous();
  const at::Tensor device_ends = ends.to(rows.device()).contiguous();
  kernels::ExpertBiases args =
      expert_biases(values, device_ends, per_expert, rows);
  args.dots = dots.mutable_data_ptr<float>();
  kernels::add_expert_bias_dots(args, moe_stream());
  check_kernel_launch();
}

bool multiplies_groups(
    const at::Tensor& a,
    const at::Tensor& b,
    std::int64_t out_features,
    std::int64_t in_features) {
  return a.is_cuda() && a.scalar_type() == at::kBFloat16 &&
         b.scalar_type() == at::kBFloat16 && begins_aligned(a) &&
         begins_aligned(b) && out_features % 8 == 0 && in_features % 8 == 0 &&
         gpu_has(a.device(), GpuFeature::grouped_products);
}

void grouped_mm(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& ends,
    at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(a.device());
  at::cuda::detail::bf16bf16_grouped_mm(a, b, ends, std::nullopt, out);
}

}  // namespace flatshard::nn::cuda
