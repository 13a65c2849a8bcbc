#include "flatshard/checkpoint/changed_elements.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

/// Returns the values as integers of their size: NaN equals itself, and 0
/// differs from -0.
at::Tensor bits_of(const at::Tensor& values) {
  switch (values.element_size()) {
    case 1:
      return values.view(at::kByte);
    case 2:
      return values.view(at::kShort);
    case 4:
      return values.view(at::kInt);
    default:
      return values.view(at::kLong);
  }
}

}  // namespace

ChangedElements compare_elements(
    const at::Tensor& now,
    const at::Tensor& copy,
    const at::Tensor& earlier,
    const at::Tensor& borders) {
  if (detail::cuda_compares(now, copy)) {
    return detail::cuda_compare_elements(now, copy, earlier, borders);
  }
  const at::Tensor values = now.to(copy.scalar_type());
  const at::Tensor differs = bits_of(values).ne(bits_of(copy));
  if (earlier.defined()) {
    differs.index_fill_(0, earlier, true);
  }
  copy.copy_(values);
  ChangedElements changed{.copy = copy};
  changed.marks = differs.nonzero().view(-1);
  changed.values = values.index_select(0, changed.marks);
  changed.num_before = at::searchsorted(changed.marks, borders).cpu();
  return changed;
}

void list_elements(
    const ChangedElements& changed,
    const ElementRun& run,
    const at::Tensor& indices,
    const at::Tensor& values) {
  const std::int64_t n = indices.numel();
  if (n == 0) {
    return;
  }
  if (changed.ends.defined()) {
    detail::cuda_list_elements(changed, run, indices, values);
    return;
  }
  indices.copy_(changed.marks.narrow(0, run.num_before, n) + run.shift);
  values.copy_(changed.values.narrow(0, run.num_before, n));
}

}  // namespace flatshard
