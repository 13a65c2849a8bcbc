#include "flatshard/graphs/static_tensor.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard {

at::Tensor hand_out(
    const at::Tensor& memory,
    std::shared_ptr<void> use,
    at::Tensor other) {
  return at::from_blob(
      memory.data_ptr(),
      memory.sizes(),
      memory.strides(),
      [memory, use = std::move(use), other = std::move(other)](void*) {},
      memory.options(),
      memory.device());
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

at::Tensor without_repeats(at::Tensor tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
    }
  }
  return tensor;
}

}  // namespace flatshard
