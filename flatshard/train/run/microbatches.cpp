#include "flatshard/train/run/microbatches.h"
#include "flatshard/graphs/model_graphs.h"

#include <ATen/ATen.h>

namespace flatshard {

Microbatches::Microbatches(
    models::Llama model,
    std::shared_ptr<Runtime> runtime,
    std::shared_ptr<Mesh> mesh,
    const Batches& batches,
    const MicrobatchOptions& options)
    : model_(std::move(model)),
      samples_(options.samples),
      runtime_(std::move(runtime)),
      mesh_(std::move(mesh)),
      batches_(batches) {
  if (options.overlap) {
    losses_.resize(batches.num_microbatches());
    overlap_ = std::make_unique<OverlapRunner>(
        runtime_,
        pieces(),
        static_cast<int>(batches.num_microbatches()),
        *options.overlap);
  } else if (options.as_graph) {
    // Batches has them at the same addresses in every step.
    graph_ = std::make_unique<StepGraph>(
        runtime_,
        [this](const nn::TensorList&) { return nn::TensorList{run()}; });
  }
}

GraphStats Microbatches::graph_stats() const {
  return graph_ ? graph_->stats() : runtime_->graphs().stats();
}

OverlapModel Microbatches::pieces() {
  const auto modules = model_->unit_modules();
  OverlapModel model{
      .root = runtime_->unit_of(*model_),
      .ends =
          PlanUnits::Ends{
              .embed = runtime_->unit_of(*modules.front()),
              .head = runtime_->unit_of(*modules.back())},
      .embed = [this](int m) { return model_->embed(batches_.tokens(m)); },
      .nodes =
          [this](int m, int l) {
            return model_->blocks()[l]->nodes(batches_.documents(m));
          },
      .head =
          [this](int m, const at::Tensor& hidden) {
            mesh_->check();
            const at::Tensor loss = weighted(
                model_->head(
                    hidden,
                    batches_.targets(m),
                    batches_.target_share(m)),
                m);
            losses_[m] = loss.detach();
            return loss / static_cast<double>(batches_.num_microbatches());
          }};
  for (const models::LlamaBlock& block : model_->blocks()) {
    model.layers.push_back(runtime_->unit_of(*block));
  }
  return model;
}

at::Tensor Microbatches::forward_backward() {
  return overlap_ ? run_overlapped() : graph_ ? graph_->run({})[0] : run();
}

at::Tensor Microbatches::run_overlapped() {
  mesh_->check();
  overlap_->run();
  at::Tensor sum = losses_.front();
  for (std::size_t m = 1; m < losses_.size(); ++m) {
    sum = sum + losses_[m];
  }
  return sum / static_cast<double>(losses_.size());
}

at::Tensor Microbatches::weighted(
    const at::Tensor& loss,
    std::int64_t microbatch) const {
  const at::Tensor weight = batches_.loss_weight(microbatch);
  return weight.defined() ? loss * weight : loss;
}

at::Tensor Microbatches::run() {
  const std::int64_t count = batches_.num_microbatches();
  const auto divisor = static_cast<double>(count);
  at::Tensor sum;
  for (std::int64_t m = 0; m < count; ++m) {
    mesh_->check();
    runtime_->set_is_last_microbatch(m == count - 1);
    if (samples_.defined()) {
      samples_.copy_(batches_.samples(m));
    }
    const at::Tensor loss = weighted(
        model_(
            batches_.tokens(m),
            batches_.targets(m),
            batches_.documents(m),
            batches_.target_share(m)),
        m);
    (count == 1 ? loss : loss / divisor).backward();
    const at::Tensor value = loss.detach();
    sum = sum.defined() ? sum + value : value;
  }
  return sum / divisor;
}

}  // namespace flatshard
