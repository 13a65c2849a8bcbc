#include "flatshard/comm/sum_rows.h"

#include <ATen/ATen.h>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard {

void sum_rows(
    const at::Tensor& out,
    const at::Tensor& rows,
    int rank,
    const at::Tensor& own,
    ReduceOp op) {
  const double scale =
      op == ReduceOp::avg ? 1.0 / static_cast<double>(rows.size(0)) : 1.0;
  FLATSHARD_CHECK(
      op != ReduceOp::max || !out.is_cuda(),
      internal,
      "sum_rows does not support max on CUDA, because NCCL does the "
      "all-reduces there");
  if (out.is_cuda()) {
    detail::cuda_sum_rows(out, rows, rank, own, scale);
    return;
  }
  const at::ScalarType dtype = out.scalar_type();
  const bool direct = dtype != at::kHalf && dtype != at::kBFloat16;
  const at::Tensor sum =
      direct ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
  for (std::int64_t r = 0; r < rows.size(0); ++r) {
    const at::Tensor row = r == rank ? own : rows.select(0, r);
    if (r == 0) {
      sum.copy_(row);
    } else if (op == ReduceOp::max) {
      sum.copy_(at::maximum(sum, row));
    } else {
      sum.add_(row);
    }
  }
  if (op == ReduceOp::avg) {
    sum.mul_(scale);
  }
  if (!direct) {
    out.copy_(sum);
  }
}

void sum_rows(const at::Tensor& out, const at::Tensor& rows, ReduceOp op) {
  sum_rows(out, rows, 0, rows.select(0, 0), op);
}

void add_scaled(
    const at::Tensor& into,
    const at::Tensor& from,
    double scale,
    bool add) {
  if (detail::cuda_adds(into, from)) {
    detail::cuda_add_scaled(into, from, scale, add);
  } else if (add) {
    into.add_(from, scale);
  } else {
    into.copy_(from);
    if (scale != 1) {
      into.mul_(scale);
    }
  }
}

}  // namespace flatshard
