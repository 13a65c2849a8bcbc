#pragma once

#include "flatshard/models/activation_checkpoint.h"
#include "flatshard/models/config.h"
#include "flatshard/models/kv_cache.h"
#include "flatshard/models/moe.h"
#include "flatshard/moe/nodes.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/embedding.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/loss.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/rms_norm.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/token_runs.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::models {

struct LlamaOptions {
  ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::none;
  /// Blocks with activation checkpointing, the first ones; unset: all.
  std::optional<std::int64_t> checkpointed_layers = {};
  /// With full activation checkpointing: the backward launches no attention
  /// kernel of the forward again. See nn::RecomputeOptions.
  bool keep_attention = false;
  /// Tokens of this rank in one run of a feed-forward part; each run is
  /// recomputed, in all blocks. 0: all tokens at once. See nn::in_token_runs.
  /// Not for experts.
  std::int64_t mlp_chunk_tokens = 0;
  bool plain_attention = false;  ///< see nn::AttentionArgs::plain
  nn::LossOptions loss;
  MoeOptions moe;
  /// The tensor-parallel ranks that split each layer and read the same tokens;
  /// null: layers are not split. Every parameter is then the part that
  /// nn::parts_below names.
  nn::TensorParallelPtr ranks = nullptr;
  /// The context-parallel ranks that share the tokens of each batch; null: the
  /// tokens are not shared. A forward then gets this rank's tokens and targets
  /// (nn::ContextParallel), and documents of all tokens. The loss is of this
  /// rank's targets.
  nn::ContextParallelPtr context = nullptr;
};

/// A RoPE table that blocks of a model share.
using SharedRope = std::shared_ptr<nn::RopeTable>;

/// o_proj(attention(norm(x))): parameters {q,k,v,o}_proj.{weight,bias}, sinks
/// [heads], {q,k}_norm.weight and post_norm.weight, as AttentionOptions and
/// NormPlacement have them.
class LlamaAttentionImpl : public nn::Module, public nn::HasParts {
 public:
  LlamaAttentionImpl(
      const ModelConfig& config,
      std::int64_t layer,
      SharedRope rope,
      const LlamaOptions& options);
  /// @param x     [batch, seq, dim], this rank's tokens of seq
  /// @param norm  of x; null: x itself is read.
  /// @param documents  of the rows, with the tokens of all context-parallel
  ///   ranks; undefined: each row is one.
  /// @return   (x to continue with as the residual; see nn::norm_linears,
  ///   [batch, seq, dim] to add to it)
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& x,
      nn::RmsNormImpl* norm,
      const nn::Documents& documents);
  /// Runs tokens that are added to a cache. No backward follows.
  /// @return   as forward
  std::tuple<at::Tensor, at::Tensor> extend(
      const at::Tensor& x,
      nn::RmsNormImpl* norm,
      KvCache& cache,
      const CacheStep& step);
  /// Returns the non-parameter inputs of the forward of x: the rotary table,
  /// and the samples of dropout.
  nn::TensorList constants(const at::Tensor& x);
  nn::ParameterParts parts() const override;

 private:
  /// q and k rotated; [batch, seq, heads, head_dim] each.
  struct Heads {
    at::Tensor residual;  ///< x to continue with
    at::Tensor q, k, v;
  };
  /// The rotary table, and the row of each token: see nn::rope.
  struct Rotation {
    at::Tensor cos, sin, rows;
  };
  /// @param x          as for `forward`
  /// @param documents  each is rotated by its own length, whatever row it is in
  Rotation rotation_of(const at::Tensor& x, const nn::Documents& documents);
  Heads
  project(const at::Tensor& x, nn::RmsNormImpl* norm, const Rotation& rotation);
  /// @param attended  [batch, seq, heads * head_dim]
  at::Tensor output(const at::Tensor& attended);
  std::tuple<at::Tensor, at::Tensor> attend(
      const at::Tensor& x,
      nn::RmsNormImpl* norm,
      const nn::Documents& documents);

  /// Returns the arguments for some of q's heads, among those that the
  /// projections return.
  nn::AttentionArgs args(const nn::IndexPart& heads) const;

  /// Tokens of a full sequence if a rank has `tokens` of them.
  std::int64_t whole_seq(std::int64_t tokens) const {
    return tokens * (ranks_ ? ranks_->size() : 1) *
           (token_ranks_ ? token_ranks_->num_ranks() : 1);
  }

  std::int64_t heads_;  ///< over all ranks
  std::int64_t head_dim_;
  nn::TensorParallelPtr ranks_;
  nn::ContextParallelPtr token_ranks_;
  QkNorm qk_norm_;
  nn::AttentionArgs args_;
  SharedRope rope_;
  nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr},
      o_proj_{nullptr};
  at::Tensor sinks_;                               ///< or undefined
  nn::RmsNorm q_norm_{nullptr}, k_norm_{nullptr};  ///< null without qk_norm
  nn::RmsNorm post_norm_{nullptr};                 ///< or null
};
FLATSHARD_MODULE(LlamaAttention);

/// h + down(act(gate(norm(h))) * up(norm(h))): parameters
/// {gate,up,down}_proj.{weight,bias} and post_norm.weight, as BlockOptions has
/// them.
class LlamaMlpImpl : public nn::Module {
 public:
  /// @param run_tokens  see LlamaOptions::mlp_chunk_tokens
  explicit LlamaMlpImpl(
      const ModelConfig& config,
      const nn::TensorParallelPtr& ranks = nullptr,
      std::int64_t run_tokens = 0);
  /// @param x, delta  [batch, seq, dim], h = x + delta; delta may be undefined
  /// @param norm      of h; null: h itself is read.
  /// @param is_result_of_part  it is the result of the innermost recomputed
  ///   part around this call, so that nothing reads it in a second run.
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& delta,
      nn::RmsNormImpl* norm,
      bool is_result_of_part = false);

 private:
  /// @param is_result_of_part  as for `forward`
  at::Tensor run(
      const at::Tensor& x,
      const at::Tensor& delta,
      nn::RmsNormImpl* norm,
      bool is_result_of_part);

  nn::GateActivation activation_;
  std::int64_t run_tokens_;
  nn::Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
  nn::RmsNorm post_norm_{nullptr};  ///< or null
};
FLATSHARD_MODULE(LlamaMlp);

/// One transformer block, [batch, seq, dim] -> the same.
class LlamaBlockImpl : public nn::Module {
 public:
  /// @param loss_gradient  of the model's loss, for its auxiliary losses; null:
  ///   there are none.
  LlamaBlockImpl(
      const ModelConfig& config,
      std::int64_t layer,
      SharedRope rope,
      const LlamaOptions& options,
      const nn::LossGradientPtr& loss_gradient);
  /// @param documents  of the rows; undefined: each row is one.
  at::Tensor forward(const at::Tensor& x, const nn::Documents& documents = {});
  /// Runs tokens that are added to a cache. No hooks run, and no backward
  /// follows. @param x  [step.num_rows, seq, dim]
  at::Tensor extend(const at::Tensor& x, KvCache& cache, const CacheStep& step);
  /// Returns null for a block without experts.
  Moe& moe() { return moe_; }
  /// One call in pieces, with the results of forward.
  /// With selective activation checkpointing attention is kept where a schedule
  /// recomputes.
  /// @throws Error{usage} with full activation checkpointing.
  nn::Nodes nodes(const nn::Documents& documents = {});

 private:
  at::Tensor run(
      const at::Tensor& in,
      const std::shared_ptr<RoutingRecord>& record,
      const nn::Documents& documents);
  at::Tensor run_with_experts(
      const at::Tensor& x,
      const nn::Documents& documents);
  /// @param is_result_of_part  see LlamaMlpImpl::forward
  at::Tensor feed_forward(
      const at::Tensor& x,
      const at::Tensor& delta,
      RoutingRecord* record,
      bool is_result_of_part);

  ActivationCheckpoint checkpoint_;
  nn::RecomputeOptions recompute_;        ///< of an entire block
  bool in_token_runs_;                    ///< the feed-forward part
  nn::RmsNorm input_layernorm_{nullptr};  ///< or null
  LlamaAttention self_attn_{nullptr};
  nn::RmsNorm post_attention_layernorm_{nullptr};  ///< or null
  LlamaMlp mlp_{nullptr};                          ///< or null: experts
  Moe moe_{nullptr};
};
FLATSHARD_MODULE(LlamaBlock);

/// Final norm and output head, one module so that it is one unit.
class LlamaHeadImpl : public nn::Module, public nn::HasParts {
 public:
  /// @param tied  the embedding that shares its weight with the head, or null.
  LlamaHeadImpl(
      const ModelConfig& config,
      const nn::EmbeddingImpl* tied,
      nn::LossOptions loss,
      nn::TensorParallelPtr ranks = nullptr);
  /// Returns the loss for targets int64 [batch, seq]: a float32 scalar, the
  /// same on all ranks that share the head. For undefined targets it returns
  /// logits [batch, seq, vocab], without a gradient if ranks share the head.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& targets);
  nn::ParameterParts parts() const override;

 private:
  nn::LossOptions loss_;
  double soft_cap_;
  nn::RmsNorm norm_{nullptr};
  at::Tensor weight_;
};
FLATSHARD_MODULE(LlamaHead);

/// embed_tokens and layers: the part that Hugging Face calls `model`.
class LlamaBodyImpl : public nn::Module {
 public:
  LlamaBodyImpl(
      const ModelConfig& config,
      const LlamaOptions& options,
      const nn::LossGradientPtr& loss_gradient);
  /// int64 [batch, seq] -> [batch, seq, dim], before the final norm.
  at::Tensor forward(
      const at::Tensor& tokens,
      const nn::Documents& documents = {});
  nn::Embedding& embed_tokens() { return embed_tokens_; }
  std::vector<LlamaBlock>& layers() { return layers_; }

 private:
  nn::Embedding embed_tokens_{nullptr};
  std::vector<LlamaBlock> layers_;
};
FLATSHARD_MODULE(LlamaBody);

/// A router and its name in the model, without a parameter's name.
struct RouterOf {
  std::string name;
  RouterImpl* router;  ///< owned by the model

  /// Returns the name of its bias in files.
  std::string bias_name() const { return name + ".e_score_correction_bias"; }
};

/// A decoder-only transformer of any family. Built without memory (see
/// nn::Module); parameters have Hugging Face's names, except as listed in
/// hf_names.h. Initialization: normal(0, 0.02), o_proj and down_proj scaled by
/// 1 / sqrt(2 * layers), norms 1. Source: Llama 3, arXiv:2407.21783.
class LlamaImpl : public nn::Module {
 public:
  /// @throws Error{config} for an invalid config.
  explicit LlamaImpl(ModelConfig config, LlamaOptions options = {});

  /// tokens, targets int64 [batch, seq] -> loss by LossOptions. Returns logits
  /// for undefined targets. Call through the holder so that hooks run.
  /// @param documents  of the tokens, to separate them in attention; undefined:
  ///   each row is one. See LlamaOptions::context.
  /// @param share  float32 [], a factor of the loss, but not of auxiliary
  ///   losses; undefined: 1.
  at::Tensor forward(
      const at::Tensor& tokens,
      const at::Tensor& targets = {},
      const nn::Documents& documents = {},
      const at::Tensor& share = {});

  /// Returns the modules that are usually unsharded together, in forward order:
  /// embedding, each block, head. They contain all parameters.
  std::vector<std::shared_ptr<nn::Module>> unit_modules();

  /// Returns the routers of the blocks that have experts, in order.
  std::vector<RouterOf> routers();

  // The forward in pieces, for schedules (embed, each block's nodes(), head)
  // and for Decoder. Hooks of these modules do not run: a schedule marks the
  // start and end of each.

  at::Tensor embed(const at::Tensor& tokens);
  std::vector<LlamaBlock>& blocks() { return body_->layers(); }
  /// @param hidden  of the last block; loss or logits as forward has them.
  at::Tensor head(
      const at::Tensor& hidden,
      const at::Tensor& targets,
      const at::Tensor& share = {});

  const ModelConfig& config() const { return config_; }

 private:
  /// Returns `result`. A loss is multiplied by `share`. Then its gradient is
  /// passed to routers.
  at::Tensor with_loss_gradient(
      const at::Tensor& result,
      const at::Tensor& targets,
      const at::Tensor& share) const;

  ModelConfig config_;
  std::int64_t num_token_parts_ = 1;   ///< context-parallel ranks
  nn::LossGradientPtr loss_gradient_;  ///< null without auxiliary losses
  LlamaBody body_{nullptr};
  LlamaHead head_{nullptr};
};
FLATSHARD_MODULE(Llama);

/// Loss and logits through the holder, by name.
inline at::Tensor forward_loss(
    Llama& model,
    const at::Tensor& tokens,
    const at::Tensor& targets) {
  return model(tokens, targets);
}
inline at::Tensor logits(Llama& model, const at::Tensor& tokens) {
  return model(tokens);
}

}  // namespace flatshard::models
