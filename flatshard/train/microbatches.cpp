#include "flatshard/train/microbatches.h"

#include <ATen/ATen.h>

namespace flatshard {

Microbatches::Microbatches(
    models::Llama model,
    std::shared_ptr<Runtime> runtime,
    std::shared_ptr<Mesh> mesh,
    const Batches& batches)
    : model_(std::move(model)),
      runtime_(std::move(runtime)),
      mesh_(std::move(mesh)),
      batches_(batches) {
}

at::Tensor Microbatches::forward_backward() {
  const std::int64_t count = batches_.num_microbatches();
  const auto divisor = static_cast<double>(count);
  at::Tensor sum;
  for (std::int64_t m = 0; m < count; ++m) {
    mesh_->check();
    runtime_->set_is_last_microbatch(m == count - 1);
    const at::Tensor loss = model_(batches_.tokens(m), batches_.targets(m));
    (count == 1 ? loss : loss / divisor).backward();
    const at::Tensor value = loss.detach();
    sum = sum.defined() ? sum + value : value;
  }
  return sum / divisor;
}

}  // namespace flatshard
