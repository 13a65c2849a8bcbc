#include "flatshard/train/plan/attention_work.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;
using plan::NodeWork;

// Attention of chunks runs FlashAttention-2, and a Gpu's rates are of
// cuDNN: 1.7 to 2.3 times as fast on Hopper (Hugging Face transformers,
// #48163).
constexpr double kFlashOverCudnn = 2;

}  // namespace

Stages AttentionWork::stages() const {
  const std::int64_t q = model_.heads * model_.head_dim / sharing_;
  const std::int64_t kv = model_.kv_heads * model_.head_dim / sharing_;
  Stages stages(4);
  norm(stages[0].work, /*with_delta=*/false);
  // Frozen embeddings give the first layer's input no gradient.
  const bool back = !frozen_ || layer_ > 0;
  if (!back) {
    stages[0].work.backward.clear();
  }
  stages[1].reads = Stage::Reads::tokens;
  stages[1].has_input_gradient = back;
  stages[1].gathers_again = !frozen_;
  NodeWork& in = stages[1].work;
  for (const auto& [module, width] :
       {std::pair("self_attn.q_proj", q),
        {"self_attn.k_proj", kv},
        {"self_attn.v_proj", kv}}) {
    product(in, module, tokens_, width, model_.dim, back);
    stages[1].gathers_again |= has_adapter(module);
  }
  NodeWork& node = stages[2].work;
  const double rotated = d(tokens_) * d(q + kv) * size_;
  if (model_.block.attention.qk_norm != models::QkNorm::none) {
    node.forward.push_back(Kernel::memory("norm", 2 * rotated));
    node.backward.push_back(Kernel::memory("norm", 4 * rotated));
  }
  node.forward.push_back(Kernel::memory("rope", 2 * rotated));
  node.backward.push_back(Kernel::memory("rope", 2 * rotated));
  const double queries = d(bytes(q));
  const double all = queries + 2 * d(bytes(exchanged_kv()));
  exchange_heads(node.forward, all);
  gather_over_hosts(node.forward);
  exchange_heads(node.backward, queries);
  gather_over_hosts(node.backward);
  for (const bool backward : {false, true}) {
    plan::Kernels& kernels = backward ? node.backward : node.forward;
    kernels.push_back(Kernel::attention(
        backward,
        d(options_.training.local_batch_size) / d(hosts_),
        d(model_.heads / sharing_ / context_),
        d(options_.training.seq_len),
        model_.head_dim));
    kernels.back().slowdown = hosts_ > 1 ? kFlashOverCudnn : 1;
  }
  node.forward.back().is_kept = options_.keeps_attention;
  exchange_heads(node.forward, queries);
  if (hosts_ > 1) {
    node.backward.push_back(Kernel::over_hosts(
        plan::Transfer::all_to_all,
        d(2 * hosts_ * rows_of_floats(exchanged_kv()))));
  }
  exchange_heads(node.backward, all);
  stages[3].reads = Stage::Reads::columns;
  product(stages[3].work, "self_attn.o_proj", tokens_, model_.dim, q);
  return stages;
}

std::int64_t AttentionWork::kept_nbytes() const {
  const std::int64_t heads = model_.heads / sharing_;
  return options_.keeps_attention
             ? bytes(heads * model_.head_dim) + rows_of_floats(heads)
             : 0;
}

std::int64_t AttentionWork::saved_nbytes() const {
  const std::int64_t heads = model_.heads / sharing_;
  const std::int64_t kv_heads = model_.kv_heads / sharing_;
  const std::int64_t q = heads * model_.head_dim;
  const std::int64_t kv =
      context_ > 1 ? exchanged_kv() : kv_heads * model_.head_dim;
  // With context parallelism the result is stored by heads and by tokens.
  std::int64_t nbytes = own_bytes(norm_width()) +
                        bytes((context_ > 1 ? 3 : 2) * q + 2 * kv) +
                        own_rows_of_floats(1) + rows_of_floats(heads);
  if (model_.block.attention.qk_norm != models::QkNorm::none) {
    nbytes += bytes(q + kv) + rows_of_floats(heads + kv_heads);
  }
  return nbytes + adapters_saved(
                      {"self_attn.q_proj",
                       "self_attn.k_proj",
                       "self_attn.v_proj",
                       "self_attn.o_proj"});
}

std::int64_t AttentionWork::gathered_nbytes() const {
  return hosts_ == 1
             ? 0
             : 2 * hosts_ *
                   (2 * bytes(exchanged_kv()) + rows_of_floats(exchanged_kv()));
}

std::int64_t AttentionWork::exchanged_kv() const {
  return std::max(model_.kv_heads / sharing_, context_) * model_.head_dim;
}

void AttentionWork::exchange_heads(plan::Kernels& to, double nbytes) const {
  if (context_ > 1) {
    to.push_back(Kernel::exchange(plan::Transfer::all_to_all, nbytes));
  }
}

void AttentionWork::gather_over_hosts(plan::Kernels& to) const {
  if (hosts_ > 1) {
    to.push_back(Kernel::over_hosts(
        plan::Transfer::all_gather,
        d(2 * hosts_ * bytes(exchanged_kv()))));
    to.back().is_kept = options_.keeps_attention;
  }
}

}  // namespace flatshard
