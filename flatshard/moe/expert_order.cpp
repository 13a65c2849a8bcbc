#include "flatshard/moe/expert_order.h"

#include "flatshard/core/error.h"
#include "flatshard/moe/cuda_moe.h"

#include <ATen/ATen.h>

namespace flatshard::nn {

at::Tensor count_experts(const at::Tensor& experts, std::int64_t num_experts) {
  if (experts.is_cuda()) {
    return cuda::count_experts(experts, num_experts);
  }
  return at::bincount(experts.flatten(), {}, num_experts).to(at::kInt);
}

ExpertOrder order_by_expert(
    const at::Tensor& experts,
    std::int64_t num_experts) {
  FLATSHARD_CHECK(
      experts.dim() == 2 &&
          at::isIntegralType(experts.scalar_type(), /*includeBool=*/false),
      usage,
      "order_by_expert: expected integers [tokens, slots], got {} {}",
      c10::toString(experts.scalar_type()),
      c10::str(experts.sizes()));
  const at::Tensor chosen = experts.to(at::kInt);
  ExpertOrder order;
  order.counts = count_experts(chosen, num_experts);
  FLATSHARD_CHECK(
      order.counts.size(0) == num_experts,
      usage,
      "order_by_expert: expected experts below {}, got {}",
      num_experts,
      order.counts.size(0) - 1);
  order.permutation = sort_by_expert(chosen, order.counts);
  order.permutation.drops = false;
  return order;
}

}  // namespace flatshard::nn
