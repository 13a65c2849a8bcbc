#include "flatshard/moe/grouped_matmul.h"

#include "flatshard/device/capability.h"
#include "flatshard/moe/cuda_moe.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

// Maximum number of groups of torch's kernel.
constexpr std::int64_t kMaxGroups = 1023;

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool in_one_kernel(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& weight,
    const Groups& groups) {
  return groups.per_expert == 1 && groups.ends.size(0) <= kMaxGroups &&
         a.is_cuda() && a.scalar_type() == at::kBFloat16 &&
         b.scalar_type() == at::kBFloat16 && is_aligned(a) && is_aligned(b) &&
         weight.size(1) % 8 == 0 && weight.size(2) % 8 == 0 &&
         gpu_has(a.device(), GpuFeature::grouped_products);
}

// Returns whether the kernels for sm_90a support these.
bool in_own_kernel(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& weight,
    const Groups& groups) {
  return in_one_kernel(a, b, weight, groups) && a.is_contiguous() &&
         b.is_contiguous() &&
         cuda::has_grouped_products(a.device(), weight.sizes());
}

// x[r] W[e]^T, or x[r] W[e] with `is_in_out`, for the rows r of each expert e.
at::Tensor multiply_rows(
    const at::Tensor& x,
    const at::Tensor& weight,
    bool is_in_out,
    const Groups& groups) {
  const at::Tensor matrices = is_in_out ? weight : weight.transpose(1, 2);
  at::Tensor y = at::empty({x.size(0), matrices.size(2)}, x.options());
  if (in_own_kernel(x, weight, weight, groups)) {
    cuda::grouped_rows(y, x, weight, is_in_out, groups.ends);
    return y;
  }
  if (in_one_kernel(x, weight, weight, groups)) {
    cuda::grouped_mm(x, matrices, groups.ends, y);
    return y;
  }
  for_each_group(
      groups,
      [&](std::int64_t e, bool, std::int64_t begin, std::int64_t end) {
        at::Tensor out = y.slice(0, begin, end);
        at::mm_out(out, x.slice(0, begin, end), matrices[e]);
      });
  return y;
}

void loop_weight_gradient(
    at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  for_each_group(
      groups,
      [&](std::int64_t e, bool first, std::int64_t begin, std::int64_t end) {
        at::Tensor out = grad[e];
        const at::Tensor gt = g.slice(0, begin, end).t();
        const at::Tensor rows = x.slice(0, begin, end);
        if (!first) {
          // Bitwise identical to the sum of other ranks' matmuls. addmm is not:
          // it adds pieces of a matmul of many rows one by one.
          out.add_(at::mm(gt, rows));
        } else if (accumulate) {
          at::addmm_out(out, out, gt, rows);
        } else {
          at::mm_out(out, gt, rows);
        }
      });
}

}  // namespace

void for_each_group(
    const Groups& groups,
    const std::function<void(
        std::int64_t expert,
        bool first,
        std::int64_t begin,
        std::int64_t end)>& fn) {
  const at::Tensor ends = groups.ends.cpu();
  const auto* end = ends.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < ends.numel(); ++i) {
    fn(i / groups.per_expert,
       i % groups.per_expert == 0,
       i == 0 ? 0 : end[i - 1],
       end[i]);
  }
}

at::Tensor grouped_forward(
    const at::Tensor& x,
    const at::Tensor& weight,
    const Groups& groups) {
  return multiply_rows(x, weight, /*is_in_out=*/false, groups);
}

at::Tensor grouped_input_gradient(
    const at::Tensor& g,
    const at::Tensor& weight,
    const Groups& groups) {
  return multiply_rows(g, weight, /*is_in_out=*/true, groups);
}

bool adds_to_float32(
    const at::Tensor& weight,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  return in_own_kernel(g, x, weight, groups);
}

void grouped_weight_gradient(
    at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  const bool has_dtype = grad.scalar_type() == at::kFloat ||
                         (grad.scalar_type() == at::kBFloat16 && !accumulate);
  if (has_dtype && grad.is_contiguous() && is_aligned(grad) &&
      in_own_kernel(g, x, grad, groups)) {
    cuda::grouped_weight_gradient(grad, accumulate, g, x, groups.ends);
    return;
  }
  const bool kernel = in_one_kernel(g, x, grad, groups);
  const bool is_direct =
      grad.scalar_type() == g.scalar_type() &&
      (!kernel || (!accumulate && grad.is_contiguous() && is_aligned(grad)));
  at::Tensor value = is_direct ? grad : at::empty(grad.sizes(), g.options());
  if (kernel) {
    cuda::grouped_mm(g.t(), x, groups.ends, value);
  } else {
    loop_weight_gradient(value, accumulate && is_direct, g, x, groups);
  }
  if (!is_direct) {
    accumulate ? grad.add_(value) : grad.copy_(value);
  }
}

}  // namespace flatshard::nn
