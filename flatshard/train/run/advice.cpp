#include "flatshard/train/run/advice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {
namespace {

constexpr std::int64_t kLongRunSteps = 500;
// More checkpoints than this are reported.
constexpr std::int64_t kManyCheckpoints = 5;
// The remainder is used by NCCL, the driver, cuBLAS and memory that the
// allocator cannot use.
constexpr double kUsableShare = 0.9;

double gib(std::int64_t nbytes) {
  return static_cast<double>(nbytes) / kGiB;
}

std::string advice_on_length(const AdviceOptions& options) {
  const std::int64_t steps = options.steps;
  if (steps <= kLongRunSteps) {
    return "";
  }
  std::vector<std::string> parts;
  if (options.warmup_steps == 0) {
    parts.push_back(
        "the learning rate has no warm-up (lr_scheduler.warmup_steps)");
  }
  const std::int64_t interval = options.checkpoint_interval;
  if (interval == 0) {
    parts.push_back("no checkpoint is saved, so a failure loses all "
                    "(checkpoint.interval)");
  } else if (
      options.kept_checkpoints == 0 && steps / interval > kManyCheckpoints) {
    parts.push_back(fmt::format(
        "all {} checkpoints of about {:.2g} GiB are kept "
        "(checkpoint.keep_latest_k)",
        steps / interval,
        gib(options.checkpoint_nbytes)));
  }
  return parts.empty() ? ""
                       : fmt::format(
                             "advice for {} steps: {}",
                             with_commas(steps),
                             fmt::join(parts, "; "));
}

std::string advice_on_memory(
    const AdviceOptions& options,
    std::int64_t table_nbytes,
    std::int64_t capacity_nbytes) {
  if (capacity_nbytes <= 0) {
    return "";
  }
  const std::int64_t activations =
      options.recomputes ? 0 : options.activation_nbytes;
  const double share = static_cast<double>(table_nbytes + activations) /
                       static_cast<double>(capacity_nbytes);
  if (share < kUsableShare) {
    return "";
  }
  if (options.recomputes) {
    return fmt::format(
        "advice on memory: the table needs {:.1f} of the GPU's {:.1f} GiB; use "
        "more ranks, or a parallelism.strategy that shards more",
        gib(table_nbytes),
        gib(capacity_nbytes));
  }
  return fmt::format(
      "advice on memory: the table's {:.1f} GiB and about {:.1f} GiB of "
      "activations come near the GPU's {:.1f} GiB; "
      "activation_checkpoint.mode = \"selective\" or \"full\" recomputes "
      "activations (of all blocks if layers is unset), a smaller "
      "training.local_batch_size or seq_len has fewer",
      gib(table_nbytes),
      gib(activations),
      gib(capacity_nbytes));
}

}  // namespace

std::int64_t activation_nbytes(
    const models::ModelConfig& model,
    std::int64_t tokens,
    std::int64_t element_size) {
  const std::int64_t head_dim =
      model.head_dim > 0 ? model.head_dim : model.dim / model.heads;
  const std::int64_t queries = model.heads * head_dim;
  const std::int64_t keys_and_values = 2 * model.kv_heads * head_dim;
  const models::BlockOptions& block = model.block;
  // Inputs of two norms, or with post-norms also of attention and of the
  // feed-forward part; queries, keys, values and the result of attention.
  const std::int64_t inputs =
      block.norms == models::NormPlacement::before ? 2 : 4;
  const std::int64_t normed =
      block.attention.qk_norm == models::QkNorm::none
          ? 0
          : queries + keys_and_values / 2;  // before their norms
  const std::int64_t attention =
      inputs * model.dim + 2 * queries + keys_and_values + normed;
  std::int64_t per_token = 0;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    std::int64_t hidden = model.ffn_dim;
    std::int64_t copies = 0;  // copies of a token's row, one per expert
    if (model.has_experts(layer)) {
      const models::MoeConfig& moe = model.moe;
      const std::int64_t expert_dim =
          moe.ffn_dim > 0 ? moe.ffn_dim : model.ffn_dim;
      hidden = (moe.experts_per_token + moe.shared_experts) * expert_dim;
      copies = moe.experts_per_token * model.dim;
    }
    // Gate and up; gate times up is recomputed.
    per_token += attention + 2 * hidden + copies;
  }
  // The inputs of the last norm and the head, and the gradient of the logits.
  per_token += 2 * model.dim + model.vocab_size;
  return per_token * element_size * tokens;
}

std::string advice(
    const AdviceOptions& options,
    std::int64_t table_nbytes,
    std::int64_t capacity_nbytes) {
  std::vector<std::string> lines;
  for (const std::string& line :
       {advice_on_length(options),
        advice_on_memory(options, table_nbytes, capacity_nbytes)}) {
    if (!line.empty()) {
      lines.push_back(line);
    }
  }
  return fmt::to_string(fmt::join(lines, "\n"));
}

}  // namespace flatshard
