#include "flatshard/train/plan/model_work.h"

#include "flatshard/models/flops.h"
#include "flatshard/train/plan/block_work.h"
#include "flatshard/train/plan/ends_work.h"
#include "flatshard/train/plan/layer_kernels.h"
#include "flatshard/train/setup/run_lora.h"

#include <fmt/format.h>

#include <algorithm>

namespace flatshard {

void add_model_work(
    const WorkOptions& options,
    const models::ModelConfig& model,
    const std::map<std::string, std::string>& float8,
    const std::set<std::string>& adapted,
    plan::Job& job) {
  const auto kernels_of = [&](std::int64_t layer) {
    return LayerKernels(
        options,
        model,
        layer,
        float8,
        adapted,
        job.copy_activations);
  };
  const auto has_adapters = [&](std::int64_t layer) {
    const std::string block = fmt::format("model.layers.{}.", layer);
    const auto first = adapted.lower_bound(block);
    return first != adapted.end() && first->starts_with(block);
  };
  bool has_backward = !options.lora.enabled();
  job.ends = EndsWork(kernels_of(0)).work();
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const BlockWork block(kernels_of(layer));
    plan::LayerWork kind =
        model.has_experts(layer) ? block.experts() : block.dense();
    has_backward = has_backward || has_adapters(layer);
    if (!has_backward) {
      kind.offloaded_nbytes = 0;
    }
    const auto found = std::ranges::find(job.layer_kinds, kind);
    job.kind_of_layer.push_back(
        static_cast<int>(found - job.layer_kinds.begin()));
    if (found == job.layer_kinds.end()) {
      job.layer_kinds.push_back(kind);
    }
  }
  const std::int64_t seq = options.training.seq_len;
  job.flops_per_token = trained_flops_per_token(options.lora, model, seq);
  job.causal_flops_per_token =
      job.flops_per_token - models::flops_per_token(model, seq) +
      models::flops_per_token(model, seq, models::FlopsConvention::causal);
  job.tokens_per_rank =
      static_cast<double>(options.training.global_batch_size) *
      static_cast<double>(seq) / static_cast<double>(job.ranks);
}

}  // namespace flatshard
