#include "flatshard/train/plan/planned_model.h"

#include "flatshard/core/error.h"
#include "flatshard/models/lora.h"
#include "flatshard/train/setup/run_lora.h"

#include <memory>

namespace flatshard {
namespace {

/// The first of ranks that share layers which are never called.
class PlannedRanks : public nn::TensorParallel {
 public:
  explicit PlannedRanks(std::int64_t size)
      : TensorParallel(0, static_cast<int>(size)) {}

  at::Tensor all_gather(const at::Tensor& /*part*/) override { refuse(); }
  at::Tensor reduce_scatter(const at::Tensor& /*addend*/) override { refuse(); }
  std::unique_ptr<nn::PendingTensor> start_all_gather(
      const at::Tensor& /*part*/) override {
    refuse();
  }
  std::unique_ptr<nn::PendingTensor> start_reduce_scatter(
      const at::Tensor& /*addend*/) override {
    refuse();
  }

 private:
  [[noreturn]] static void refuse() {
    FLATSHARD_THROW(internal, "a layer of a plan was called");
  }
};

}  // namespace

PlannedModel::PlannedModel(
    const config::Parallelism& keys,
    const config::Lora& lora,
    const models::ModelConfig& shape) {
  models::LlamaOptions options;
  options.moe.local_experts =
      shape.moe.num_experts / keys.expert_parallel_degree;
  options.moe.local_ffn_dim =
      shape.moe.ffn_dim / keys.expert_tensor_parallel_degree;
  if (keys.shares_layers()) {
    options.ranks = std::make_shared<PlannedRanks>(keys.tensor_parallel_degree);
  }
  model = models::Llama(shape, options);
  if (lora.enabled()) {
    models::add_lora(*model, lora_config(lora));
  }
  for (const models::AdaptedLayer& layer : models::adapted_layers(*model)) {
    adapted.insert(layer.weight);
  }
}

}  // namespace flatshard
