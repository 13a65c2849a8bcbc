#include "flatshard/moe/cuda_moe.h"

#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/kernel_launch.h"

#include <ATen/native/cuda/GroupMM.h>

#include <optional>
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

}  // namespace flatshard::nn::cuda
