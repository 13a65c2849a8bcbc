#include "flatshard/train/setup/memory_check.h"

#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/models/flops.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_lora.h"

namespace flatshard {

std::int64_t least_memory(
    const LeastMemoryOptions& options,
    const models::ModelConfig& model,
    std::int64_t world) {
  const auto size = [](at::ScalarType dtype) {
    return static_cast<std::int64_t>(c10::elementSize(dtype));
  };
  const config::Precision& p = options.precision;
  const config::Parallelism& parallelism = options.parallelism;
  const std::int64_t each = size(p.main_params) +
                            std::min(size(p.reduce), size(p.main_grads)) +
                            static_cast<std::int64_t>(options.state_nbytes);
  const std::int64_t replicas = parallelism.data_parallel_replicate_degree;
  const std::int64_t ranks = parallelism.num_token_ranks(world);
  const std::vector<std::int64_t> sizes =
      replicas > 1 ? std::vector{replicas, ranks / replicas}
                   : std::vector{ranks};
  const std::int64_t shards =
      Strategy::named(
          strategy_name(parallelism),
          static_cast<int>(sizes.size()))
          .num_shards(sizes) *
      parallelism.tensor_parallel_degree;  // except for norms
  const std::int64_t all = models::num_parameters(model);
  if (options.lora.enabled()) {
    // Frozen weights are stored in the compute dtype.
    const std::int64_t frozen = options.float8 ? 1 : size(p.compute);
    return (all * frozen +
            num_trainable_parameters(options.lora, model) * each) /
           shards;
  }
  const std::int64_t experts = models::num_expert_parameters(model);
  // Each rank stores only its experts, even if nothing else is sharded.
  const std::int64_t expert_shards =
      std::max(shards, config::expert_ranks(parallelism));
  return (all - experts) * each / shards + experts * each / expert_shards;
}

void check_memory(
    std::int64_t least_nbytes,
    const models::ModelConfig& model,
    std::int64_t world,
    at::Device device) {
  const std::int64_t capacity = memory_stats(device).capacity_bytes;
  FLATSHARD_CHECK(
      capacity <= 0 || least_nbytes <= capacity,
      memory,
      "a model of {} parameters needs at least {:.1f} GiB on each of {} ranks "
      "for weights, gradients and optimizer state, and this device has {:.1f} "
      "GiB; lower the sizes in [model], use more ranks, or a "
      "parallelism.strategy that shards more",
      with_commas(models::num_parameters(model)),
      static_cast<double>(least_nbytes) / kGiB,
      world,
      static_cast<double>(capacity) / kGiB);
}

}  // namespace flatshard
