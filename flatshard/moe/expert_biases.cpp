#include "flatshard/moe/expert_biases.h"

#include "flatshard/moe/cuda_moe.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/nn/wgrad.h"
#include "flatshard/ops/cuda_ops.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

// [rows, out]: each row's expert bias. Rows after the last end are arbitrary.
at::Tensor bias_of_rows(
    const at::Tensor& bias,
    std::int64_t num_rows,
    const Groups& groups) {
  const at::Tensor group = at::searchsorted(
      groups.ends,
      at::arange(num_rows, groups.ends.options()),
      /*out_int32=*/true,
      /*right=*/true);
  const at::Tensor expert =
      group.div(groups.per_expert, "floor").clamp_max_(bias.size(0) - 1);
  return bias.index_select(0, expert.to(bias.device()));
}

// Computes with the bias of each row's expert by a kernel; see ExpertBiases.
void run_bias_kernel(
    const at::Tensor& bias,
    const at::Tensor& rows,
    const at::Tensor& factors,
    const at::Tensor& dots,
    const Groups& groups) {
  const at::Tensor biases = bias.contiguous();
  const at::Tensor ends = groups.ends.to(rows.device()).contiguous();
  const at::Tensor by = factors.defined() ? factors.contiguous() : factors;
  cuda::launch(
      kernels::ExpertBiases{
          .bias = cuda::rows_in(biases),
          .ends = ends.const_data_ptr<std::int32_t>(),
          .num_groups = static_cast<int>(ends.size(0)),
          .per_expert = static_cast<int>(groups.per_expert),
          .rows = cuda::rows_in(rows),
          .factors = cuda::data_of<float>(by),
          .dots = cuda::data_of<float>(dots),
          .num_rows = rows.size(0),
          .dim = rows.size(1),
          .dtype = cuda::dtype_of(rows)},
      rows.device());
}

}  // namespace

void add_expert_biases(
    const at::Tensor& y,
    const at::Tensor& bias,
    const at::Tensor& factors,
    const Groups& groups) {
  if (cuda::supports(y)) {
    run_bias_kernel(bias, y, factors, /*dots=*/{}, groups);
    return;
  }
  const at::Tensor biases = bias_of_rows(bias, y.size(0), groups);
  y.add_(
      factors.defined() ? (biases * factors.unsqueeze(1)).to(y.scalar_type())
                        : biases);
}

void add_expert_bias_dots(
    const at::Tensor& dots,
    const at::Tensor& bias,
    const at::Tensor& g,
    const Groups& groups) {
  if (cuda::supports(g)) {
    run_bias_kernel(bias, g, /*factors=*/{}, dots, groups);
    return;
  }
  dots.add_((bias_of_rows(bias, g.size(0), groups) * g)
                .sum(1, /*keepdim=*/false, at::kFloat));
}

at::Tensor deliver_bias_sums(
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& g,
    const at::Tensor& factors,
    const Groups& groups) {
  constexpr std::int64_t kColumns = 8;  // required by one kernel
  return deliver_wgrad(context, bias, [&] {
    at::Tensor sums =
        at::empty({bias.size(0), bias.size(1), kColumns}, g.options());
    const at::Tensor columns = factors.to(g.scalar_type())
                                   .unsqueeze(1)
                                   .expand({g.size(0), kColumns})
                                   .contiguous();
    grouped_weight_gradient(sums, false, g, columns, groups);
    return sums.select(2, 0).contiguous();
  });
}

}  // namespace flatshard::nn
