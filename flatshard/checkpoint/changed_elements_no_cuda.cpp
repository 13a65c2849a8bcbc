#include "flatshard/checkpoint/changed_elements.h"
#include "flatshard/core/error.h"

namespace flatshard::detail {

bool cuda_compares(const at::Tensor&, const at::Tensor&) {
  return false;
}
ChangedElements cuda_compare_elements(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}
void cuda_list_elements(
    const ChangedElements&,
    const ElementRun&,
    const at::Tensor&,
    const at::Tensor&) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace flatshard::detail
