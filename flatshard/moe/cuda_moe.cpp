#include "flatshard/moe/cuda_moe.h"

#include "flatshard/device/capability.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/moe/kernels/grouped_products.h"

#include <ATen/native/cuda/GroupMM.h>

#include <optional>
#include <string_view>
#include <variant>

namespace flatshard::nn::cuda {
namespace {

// Kernels of experts have a rule, or only a number of experts.
template <class Kernel>
void check_limits(const Kernel& kernel) {
  RouterRule rule;
  if constexpr (requires { kernel.rule; }) {
    rule = kernel.rule;
  } else if constexpr (requires { kernel.num_experts; }) {
    rule.num_experts = kernel.num_experts;
  }
  FLATSHARD_CHECK(
      rule.num_experts <= kernels::kMaxExperts,
      config,
      "num_experts: the CUDA kernels take at most {}, got {}",
      kernels::kMaxExperts,
      rule.num_experts);
  FLATSHARD_CHECK(
      rule.groups <= kernels::kMaxRouterGroups,
      config,
      "router_groups: the CUDA kernel supports at most {}, got {}",
      kernels::kMaxRouterGroups,
      rule.groups);
}

}  // namespace

void launch(const kernels::MoeKernel& kernel, at::Device device) {
  const detail::CudaDeviceScope scope(device);
  std::visit(
      [](const auto& of_kind) {
        check_limits(of_kind);
        kernels::launch(of_kind, c10::cuda::getCurrentCUDAStream());
      },
      kernel);
  check_kernel_launch();
}

void grouped_mm(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& ends,
    at::Tensor& out) {
  const detail::CudaDeviceScope scope(a.device());
  at::cuda::detail::bf16bf16_grouped_mm(a, b, ends, std::nullopt, out);
}

bool has_grouped_products(at::Device device, at::IntArrayRef sizes) {
  return device.is_cuda() && compute_capability(device) == 90 &&
         built_for_gpus().find("90a") != std::string_view::npos &&
         sizes[1] % kernels::kProductTile == 0 &&
         sizes[2] % kernels::kProductTile == 0;
}

void grouped_rows(
    const at::Tensor& y,
    const at::Tensor& x,
    const at::Tensor& weight,
    bool is_in_out,
    const at::Tensor& ends) {
  const detail::CudaDeviceScope scope(y.device());
  C10_CUDA_CHECK(kernels::launch(
      kernels::GroupedRows{
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .ends = ends.const_data_ptr<std::int32_t>(),
          .y = y.data_ptr(),
          .rows = x.size(0),
          .experts = static_cast<int>(weight.size(0)),
          .out = static_cast<int>(y.size(1)),
          .in = static_cast<int>(x.size(1)),
          .is_in_out = is_in_out},
      c10::cuda::getCurrentCUDAStream()));
}

void grouped_weight_gradient(
    const at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const at::Tensor& ends) {
  using Use = kernels::WeightGradientUse;
  const detail::CudaDeviceScope scope(grad.device());
  C10_CUDA_CHECK(kernels::launch(
      kernels::GroupedWeightGradient{
          .g = g.const_data_ptr(),
          .x = x.const_data_ptr(),
          .ends = ends.const_data_ptr<std::int32_t>(),
          .grad = grad.data_ptr(),
          .rows = g.size(0),
          .experts = static_cast<int>(grad.size(0)),
          .out = static_cast<int>(grad.size(1)),
          .in = static_cast<int>(grad.size(2)),
          .use = accumulate                            ? Use::add_float32
                 : grad.scalar_type() == at::kBFloat16 ? Use::store_bfloat16
                                                       : Use::store_float32},
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace flatshard::nn::cuda
