#include "flatshard/train/plan/model_work.h"

#include "flatshard/models/flops.h"
#include "flatshard/train/plan/layer_kernels.h"
#include "flatshard/train/plan/stages.h"
#include "flatshard/train/setup/run_lora.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;
using plan::LayerWork;
using plan::NodeWork;
using plan::Product;
using plan::Transfer;

// Attention of chunks runs FlashAttention-2, and a Gpu's rates are of
// cuDNN: 1.7 to 2.3 times as fast on Hopper (Hugging Face transformers,
// #48163).
constexpr double kFlashOverCudnn = 2;

/// Writes down the work of a model's layers.
class ModelWork : LayerKernels {
 public:
  /// @param copies  see Job::copy_activations.
  ModelWork(const LayerKernels& kernels, bool copies)
      : LayerKernels(kernels), copies_(copies) {}

  LayerWork dense() const {
    LayerWork layer;
    NodeWork& node = layer.nodes[PlanNode::attend];
    const std::int64_t run = options_.mlp_chunk_tokens;
    Stages mlp = mlp_stages();
    for (Stage& stage : mlp) {
      stage.runs = num_chunks(own_tokens_, run);
    }
    Stages stages = attention();
    NodeWork before_mlp;
    put_together(stages, before_mlp);
    const std::size_t num_attention = before_mlp.forward.size();
    stages.insert(stages.end(), mlp.begin(), mlp.end());
    put_together(stages, node);
    const std::int64_t ffn_dim = model_.ffn_dim / sharing_;
    const std::int64_t mlp_saved =
        own_bytes(norm_width()) + bytes(2 * ffn_dim) + own_rows_of_floats(1) +
        adapters_saved({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"});
    layer.input_nbytes = own_bytes(model_.dim) + attention_kept();
    layer.saved_nbytes = attention_saved() + mlp_saved;
    layer.transient_nbytes = dense_transient(ffn_dim);
    if (selective() || run > 0) {
      // The feed-forward part saves only its input, or inputs.
      NodeWork again;
      put_together(mlp, again);
      node.recompute = again.forward;
      std::erase_if(node.recompute, is_kept);
      layer.saved_nbytes = attention_saved() + own_bytes(model_.dim);
      layer.transient_nbytes += mlp_saved;
    }
    if (run > 0) {
      if (!selective()) {
        // The second run of the block leaves the feed-forward part to its
        // backward.
        without_result(node.forward, num_attention);
      }
      // The tensors of one run, and gradients of the part's inputs and output.
      const double share = std::min(1.0, d(run) / d(own_tokens_));
      layer.transient_nbytes =
          static_cast<std::int64_t>(share * d(layer.transient_nbytes)) +
          own_bytes(3 * model_.dim);
      if (share < 1.0 && options_.reduce != at::kFloat &&
          !options_.lora.enabled()) {
        // Gradients of the part are summed over the runs in float32.
        layer.transient_nbytes +=
            3 * ffn_dim * model_.dim * static_cast<std::int64_t>(sizeof(float));
      }
    }
    with_gathered_over_hosts(layer);
    layer.offloaded_nbytes = offloaded(layer);
    return layer;
  }

  LayerWork experts() const {
    const models::MoeConfig& moe = model_.moe;
    const std::int64_t degree = options_.parallelism.expert_parallel_degree;
    const std::int64_t parts =
        options_.parallelism.expert_tensor_parallel_degree;
    // A rank routes its own tokens, to each part of an expert.
    const std::int64_t sent = own_tokens_ * moe.experts_per_token;
    const std::int64_t rows = sent * parts;
    const std::int64_t ffn_dim = moe.ffn_dim / parts;
    const double each = d(rows) * d(degree) / d(moe.num_experts);
    const double local = d(moe.num_experts / degree);
    LayerWork layer;
    Stages attend = attention();
    NodeWork& router = attend.emplace_back().work;
    norm(router, /*with_delta=*/true);
    product(router, "mlp.gate", own_tokens_, moe.num_experts, model_.dim);
    // Scores, choice and order read and write few numbers a token.
    const double scores = d(own_tokens_) * d(moe.num_experts) * sizeof(float);
    router.forward.push_back(Kernel::memory("sum", 6 * scores));
    router.backward.push_back(Kernel::memory("sum", 4 * scores));
    put_together(attend, layer.nodes[PlanNode::attend]);

    NodeWork& node = layer.nodes[PlanNode::experts];
    grouped(node, local, each, 2 * ffn_dim, model_.dim);
    const std::size_t num_read = node.forward.size();
    swiglu(node, rows, ffn_dim);
    grouped(node, local, each, model_.dim, ffn_dim);
    without_result(node.forward, num_read);
    // Rows of tokens, and the sums of a token's rows.
    const double moved = 2 * size_ * d(sent) * d(model_.dim);
    const double summed =
        size_ * d(model_.dim) * (d(sent) + 2 * d(own_tokens_));
    const bool here = degree * parts == 1;
    NodeWork& leaving = here ? node : layer.nodes[PlanNode::dispatch];
    NodeWork& returning = here ? node : layer.nodes[PlanNode::combine];
    leaving.forward.push_back(Kernel::memory("permute", moved));
    if (parts > 1) {
      // Adds up the partial results of the parts of an expert for each row.
      const double added = size_ * d(model_.dim) * d(rows + sent);
      leaving.backward.push_back(Kernel::memory("sum", added));
      returning.forward.push_back(Kernel::memory("sum", added));
    }
    leaving.backward.push_back(Kernel::memory("permute", summed));
    returning.forward.push_back(Kernel::memory("permute", summed));
    returning.forward.back().is_kept = true;
    returning.backward.push_back(Kernel::memory("permute", moved));
    // An OverlapRunner exchanges rows also where all experts are here.
    const bool keeps_rows =
        !here || options_.parallelism.overlap_expert_parallel;
    if (!keeps_rows && !frozen_) {
      // The rows are made again for the gradient of the weights.
      node.wgrad.push_back(Kernel::memory("permute", moved));
    }
    if (moe.shared_experts > 0) {
      put_together(
          gate_up_down("mlp.shared_experts", moe.shared_experts * moe.ffn_dim),
          layer.nodes[PlanNode::shared]);
    }
    layer.input_nbytes = own_bytes(model_.dim) + attention_kept();
    const auto element = static_cast<std::int64_t>(size_);
    layer.saved_nbytes =
        attention_saved() + own_bytes(2 * model_.dim) +
        2 * rows * ffn_dim * element +
        (2 * sent + rows) * static_cast<std::int64_t>(sizeof(float)) +
        own_rows_of_floats(1 + 2 * moe.num_experts) +
        (keeps_rows ? rows * model_.dim * element : 0) +
        bytes(2 * moe.shared_experts * moe.ffn_dim / sharing_) +
        adapters_saved(
            {"mlp.shared_experts.gate_proj",
             "mlp.shared_experts.up_proj",
             "mlp.shared_experts.down_proj"});
    layer.transient_nbytes = rows * (3 * ffn_dim + 2 * model_.dim) * element;
    if (selective()) {
      plan::Kernels again = layer.nodes[PlanNode::experts].forward;
      std::erase_if(again, is_kept);
      layer.nodes[PlanNode::experts].recompute = std::move(again);
      layer.transient_nbytes += layer.saved_nbytes - attention_saved();
      layer.saved_nbytes = attention_saved() + own_bytes(model_.dim);
    }
    with_gathered_over_hosts(layer);
    layer.offloaded_nbytes = offloaded(layer);
    return layer;
  }

  /// Embedding and head, with loss.
  LayerWork ends() const {
    LayerWork layer;
    const std::int64_t rows = model_.vocab_size / sharing_;
    const double wide = d(tokens_) * d(model_.dim) * size_;
    const double vocab = d(tokens_) * d(rows) * size_;
    Stage embed{.reads = Stage::Reads::columns};
    embed.work.forward.push_back(Kernel::memory("copy", 2 * wide));
    const double table =
        d(rows) * d(model_.dim) *
        d(static_cast<std::int64_t>(c10::elementSize(options_.reduce)));
    embed.work.backward.push_back(Kernel::memory("copy", table + 3 * wide));
    if (sharing_ > 1) {
      // Rows of other ranks' tokens become 0, and the table is copied once.
      embed.work.forward.push_back(Kernel::memory("copy", 2 * wide));
      embed.work.backward.push_back(Kernel::memory("copy", 2 * table));
    }
    put_together({embed}, layer.nodes[PlanNode::embed]);
    if (frozen_) {
      layer.nodes[PlanNode::embed].backward.clear();
    }
    Stages head(2);
    norm(head[0].work, /*with_delta=*/false);
    NodeWork& loss = head[1].work;
    if (sharing_ > 1) {
      // The loss waits for a separate all-gather, and a reduction after it.
      loss.forward.push_back(Kernel::exchange(Transfer::all_gather, wide));
    }
    product(loss, {}, tokens_, rows, model_.dim);
    const std::int64_t chunk = options_.loss_chunk_tokens;
    const std::int64_t weight_nbytes =
        rows * model_.dim * static_cast<std::int64_t>(sizeof(float));
    if (sharing_ > 1) {
      // The gradient does not find the row in the cache again. Between both
      // come two numbers of each token from each rank.
      loss.forward.push_back(Kernel::memory("cross_entropy", vocab));
      loss.forward.push_back(Kernel::exchange(
          Transfer::all_gather,
          d(sharing_) * 2 * d(rows_of_floats(1))));
    }
    loss.forward.push_back(Kernel::memory("cross_entropy", 2 * vocab));
    if (chunk > 0) {
      // Forward computes the gradients, and backward scales them.
      loss.forward.insert(
          loss.forward.end(),
          loss.backward.begin(),
          loss.backward.end());
      loss.forward.insert(
          loss.forward.end(),
          loss.wgrad.begin(),
          loss.wgrad.end());
      // An all-gather before the loss has all tokens.
      for (Kernel& kernel :
           std::span(loss.forward).subspan(sharing_ > 1 ? 1 : 0)) {
        kernel = kernel.in_runs(num_chunks(tokens_, chunk));
      }
      loss.backward = {Kernel::memory("copy", 2 * wide)};
      loss.wgrad.clear();
      if (!frozen_) {
        loss.wgrad.push_back(Kernel::memory("copy", d(2 * weight_nbytes)));
      }
    }
    if (sharing_ > 1) {
      loss.wgrad.push_back(Kernel::exchange(Transfer::reduce_scatter, wide));
    }
    put_together(head, layer.nodes[PlanNode::head]);
    layer.saved_nbytes = own_bytes(model_.dim) + bytes(model_.dim) +
                         own_rows_of_floats(1) + rows_of_floats(2);
    layer.transient_nbytes = bytes(model_.dim) + own_bytes(2 * model_.dim);
    if (chunk == 0) {
      layer.saved_nbytes += bytes(rows);
    } else {
      layer.saved_nbytes += bytes(model_.dim) + (frozen_ ? 0 : weight_nbytes);
      layer.transient_nbytes +=
          bytes(rows) / tokens_ * std::min(chunk, tokens_);
    }
    return layer;
  }

 private:
  static bool is_kept(const Kernel& kernel) { return kernel.is_kept; }
  /// A second run does not make the result of the part that it runs: marks
  /// kernels from a number on.
  static void without_result(plan::Kernels& kernels, std::size_t from = 0) {
    for (Kernel& kernel : std::span(kernels).subspan(from)) {
      kernel.is_kept = true;
    }
  }
  /// @param chunk  tokens; 0: all.
  static double num_chunks(std::int64_t tokens, std::int64_t chunk) {
    return chunk == 0 ? 1 : std::ceil(d(tokens) / d(chunk));
  }
  bool is_recomputed() const {
    return options_.recompute != models::ActivationCheckpoint::none &&
           layer_ < options_.recomputed_layers.value_or(model_.layers);
  }
  bool selective() const {
    return options_.recompute == models::ActivationCheckpoint::selective &&
           is_recomputed();
  }
  /// Returns the bytes of a layer that are in host memory from forward to
  /// backward.
  std::int64_t offloaded(const LayerWork& layer) const {
    if (!options_.offloads) {
      return 0;
    }
    if (!is_recomputed()) {  // the chunks' inputs: the residual and its addend
      return options_.mlp_chunk_tokens > 0 ? own_bytes(2 * model_.dim) : 0;
    }
    return selective() ? own_bytes(model_.dim) : layer.input_nbytes;
  }
  /// Returns the width that a norm saves per token, including what layers save
  /// to all-gather its result again.
  std::int64_t norm_width() const {
    return (sharing_ > 1 ? 2 : 1) * model_.dim;
  }

  /// Returns the most that the backward of a dense layer makes.
  /// @param ffn_dim  on this rank.
  std::int64_t dense_transient(std::int64_t ffn_dim) const {
    const std::int64_t dim = model_.dim;
    if (sharing_ == 1) {
      return bytes(3 * ffn_dim + 2 * dim);
    }
    // The backward of down makes the all-gathered gradient and three tensors of
    // the width. The backward of gate and up makes their gradients, the input's
    // gradient, and all-gathers the input again.
    return std::max(
        bytes(3 * ffn_dim + dim) + own_bytes(dim),
        bytes(2 * ffn_dim + 2 * dim) + own_bytes(2 * dim));
  }

  void put_together(const Stages& stages, NodeWork& node) const {
    if (sharing_ == 1) {
      append_stages(stages, node);
    } else {
      append_shared_stages(
          stages,
          d(bytes(model_.dim)),
          copies_ && !frozen_ ? sharing_ : 1,
          node);
    }
  }

  /// @param whole  width of all ranks.
  Stages gate_up_down(const std::string& module, std::int64_t whole) const {
    const std::int64_t width = whole / sharing_;
    Stages stages(4);
    stages[0].reads = Stage::Reads::tokens;
    stages[0].gathers_again = !frozen_ || has_adapter(module + ".gate_proj") ||
                              has_adapter(module + ".up_proj");
    NodeWork& in = stages[0].work;
    product(in, module + ".gate_proj", tokens_, width, model_.dim);
    product(in, module + ".up_proj", tokens_, width, model_.dim);
    swiglu(stages[1].work, tokens_, width);
    stages[2].reads = Stage::Reads::columns;
    product(stages[2].work, module + ".down_proj", tokens_, model_.dim, width);
    // Adds the output, or the sum over all ranks, to the residual. Without
    // tensor parallelism the residual is copied first.
    const double row = d(own_tokens_) * d(model_.dim) * size_;
    stages[3].work.forward.push_back(
        sharing_ == 1 ? Kernel::memory("copy", 2 * row)
                      : Kernel::memory("sum", 3 * row));
    if (model_.block.norms == models::NormPlacement::before &&
        !model_.block.mlp_bias) {  // a norm after it would read the result
      plan::Kernels& down = stages[2].work.forward;
      if (has_adapter(module + ".down_proj")) {
        // Its A reads what down reads; the two last matmuls make the result.
        down.front().is_kept = true;
        down.back().is_kept = true;
      } else {
        without_result(stages[1].work.forward);
        without_result(down);
      }
      without_result(stages[3].work.forward);
    }
    return stages;
  }

  Stages mlp_stages() const {
    Stages stages(1);
    norm(stages[0].work, /*with_delta=*/true);
    const Stages rest = gate_up_down("mlp", model_.ffn_dim);
    stages.insert(stages.end(), rest.begin(), rest.end());
    return stages;
  }

  Stages attention() const {
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

  /// Returns the width of the keys of a token that a rank sends to the ranks of
  /// context parallelism: each gets a head.
  std::int64_t exchanged_kv() const {
    return std::max(model_.kv_heads / sharing_, context_) * model_.head_dim;
  }

  void exchange_heads(plan::Kernels& to, double nbytes) const {
    if (context_ > 1) {
      to.push_back(Kernel::exchange(plan::Transfer::all_to_all, nbytes));
    }
  }

  /// Keys and values of a rank's heads. Attention that is stored needs them in
  /// its backward only.
  void gather_over_hosts(plan::Kernels& to) const {
    if (hosts_ > 1) {
      to.push_back(Kernel::over_hosts(
          plan::Transfer::all_gather,
          d(2 * hosts_ * bytes(exchanged_kv()))));
      to.back().is_kept = options_.keeps_attention;
    }
  }

  /// Returns the bytes of keys and values of all hosts in the backward of
  /// attention: all-gathered, and their gradients in float32. The exchange of
  /// these needs as much.
  std::int64_t gathered_over_hosts() const {
    return hosts_ == 1 ? 0
                       : 2 * hosts_ *
                             (2 * bytes(exchanged_kv()) +
                              rows_of_floats(exchanged_kv()));
  }

  void with_gathered_over_hosts(LayerWork& layer) const {
    layer.transient_nbytes =
        std::max(layer.transient_nbytes, gathered_over_hosts());
  }

  /// Returns the bytes of attention's output and its log-sum-exp, where a
  /// recompute does not run attention again. attention_saved has them, too.
  std::int64_t attention_kept() const {
    const std::int64_t heads = model_.heads / sharing_;
    return options_.keeps_attention
               ? bytes(heads * model_.head_dim) + rows_of_floats(heads)
               : 0;
  }

  /// Input, rotated queries and keys, values, result, its log-sum-exp, and the
  /// divisor of the norm.
  std::int64_t attention_saved() const {
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

  bool copies_;  ///< ranks that share layers copy activations
};

}  // namespace

void add_model_work(
    const WorkOptions& options,
    const models::ModelConfig& model,
    const std::map<std::string, std::string>& float8,
    const std::set<std::string>& adapted,
    plan::Job& job) {
  const bool copies = job.copy_activations;
  const auto work_of = [&](std::int64_t layer) {
    return ModelWork({options, model, layer, float8, adapted}, copies);
  };
  const auto has_adapters = [&](std::int64_t layer) {
    const std::string block = fmt::format("model.layers.{}.", layer);
    const auto first = adapted.lower_bound(block);
    return first != adapted.end() && first->starts_with(block);
  };
  bool has_backward = !options.lora.enabled();
  job.ends = work_of(0).ends();
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    LayerWork kind = model.has_experts(layer) ? work_of(layer).experts()
                                              : work_of(layer).dense();
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
