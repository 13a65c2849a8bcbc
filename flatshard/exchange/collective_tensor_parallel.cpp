#include "flatshard/exchange/collective_tensor_parallel.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace flatshard {

CollectiveTensorParallel::CollectiveTensorParallel(
    std::shared_ptr<Communicator> group)
    : TensorParallel(group->rank(), group->size()), group_(std::move(group)) {
}

at::Tensor CollectiveTensorParallel::all_gather(const at::Tensor& part) {
  std::vector<std::int64_t> sizes = part.sizes().vec();
  sizes.at(0) *= size();
  at::Tensor whole = at::empty(sizes, part.options());
  group_->all_gather(whole, part);
  return whole;
}

at::Tensor CollectiveTensorParallel::reduce_scatter(const at::Tensor& addend) {
  std::vector<std::int64_t> sizes = addend.sizes().vec();
  sizes.at(0) /= size();
  at::Tensor part = at::empty(sizes, addend.options());
  group_->reduce_scatter(part, addend, ReduceOp::sum);
  return part;
}

}  // namespace flatshard
