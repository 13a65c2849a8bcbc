#include "flatshard/moe/grouped_matmul.h"

#include "flatshard/core/error.h"
#include "flatshard/moe/cuda_moe.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

// torch's kernel accepts at most so many groups.
constexpr std::int64_t kMaxGroups = 1023;

bool in_one_kernel(
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& weight,
    const Groups& groups) {
  return groups.per_expert == 1 && groups.ends.size(0) <= kMaxGroups &&
         cuda::multiplies_groups(a, b, weight.size(1), weight.size(2));
}

at::Tensor new_rows(const at::Tensor& like, std::int64_t columns) {
  return at::empty({like.size(0), columns}, like.options());
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
          // Bit for bit what other ranks' products add up to, which addmm is
          // not: it adds pieces of a product of many rows one by one.
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
  at::Tensor y = new_rows(x, weight.size(1));
  if (in_one_kernel(x, weight, weight, groups)) {
    cuda::grouped_mm(x, weight.transpose(1, 2), groups.ends, y);
    return y;
  }
  for_each_group(
      groups,
      [&](std::int64_t e, bool, std::int64_t begin, std::int64_t end) {
        at::Tensor out = y.slice(0, begin, end);
        at::mm_out(out, x.slice(0, begin, end), weight[e].t());
      });
  return y;
}

at::Tensor grouped_input_gradient(
    const at::Tensor& g,
    const at::Tensor& weight,
    const Groups& groups) {
  at::Tensor dx = new_rows(g, weight.size(2));
  if (in_one_kernel(g, weight, weight, groups)) {
    cuda::grouped_mm(g, weight, groups.ends, dx);
    return dx;
  }
  for_each_group(
      groups,
      [&](std::int64_t e, bool, std::int64_t begin, std::int64_t end) {
        at::Tensor out = dx.slice(0, begin, end);
        at::mm_out(out, g.slice(0, begin, end), weight[e]);
      });
  return dx;
}

void grouped_weight_gradient(
    at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& x,
    const Groups& groups) {
  const bool same_dtype = grad.scalar_type() == g.scalar_type();
  const bool kernel = in_one_kernel(g, x, grad, groups);
  if (kernel && same_dtype && !accumulate && grad.is_contiguous() &&
      reinterpret_cast<std::uintptr_t>(grad.const_data_ptr()) % 16 == 0) {
    cuda::grouped_mm(g.t(), x, groups.ends, grad);
    return;
  }
  if (!kernel && same_dtype) {
    loop_weight_gradient(grad, accumulate, g, x, groups);
    return;
  }
  at::Tensor value = at::empty(grad.sizes(), g.options());
  if (kernel) {
    cuda::grouped_mm(g.t(), x, groups.ends, value);
  } else {
    loop_weight_gradient(value, false, g, x, groups);
  }
  accumulate ? grad.add_(value) : grad.copy_(value);
}

}  // namespace flatshard::nn
