#include "flatshard/train/microbatches.h"

#include <ATen/ATen.h>

namespace flatshard {

Microbatches::Microbatches(
    models::Llama model,
    std::shared_ptr<Runtime> runtime,
    std::shared_ptr<Mesh> mesh,
    const Batches& batches,
    bool as_graph)
    : model_(std::move(model)),
      runtime_(std::move(runtime)),
      mesh_(std::move(mesh)),
      batches_(batches) {
  if (as_graph) {
    // Batches has them at the same addresses in every step.
    graph_ = std::make_unique<StepGraph>(
        runtime_,
        [this](const nn::TensorList&) { return nn::TensorList{run()}; });
  }
}

GraphStats Microbatches::graph_stats() const {
  return graph_ ? graph_->stats() : runtime_->graph_stats();
}

at::Tensor Microbatches::forward_backward() {
  return graph_ ? graph_->run({})[0] : run();
}

at::Tensor Microbatches::run() {
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
