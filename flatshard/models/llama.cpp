#include "flatshard/models/llama.h"

#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/region.h"

#include <cmath>
#include <string>
#include <utility>

namespace flatshard::models {
namespace {

// Nothing in a Llama draws random numbers.
constexpr nn::RecomputeOptions kNoRng{.preserve_rng = false};

nn::RmsNormImpl* or_null(const nn::RmsNorm& norm) {
  return norm ? const_cast<nn::RmsNormImpl*>(norm.get()) : nullptr;
}

}  // namespace

LlamaBlockImpl::LlamaBlockImpl(
    const ModelConfig& config,
    std::int64_t layer,
    SharedRope rope,
    const LlamaOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("LlamaBlock"),
      checkpoint_(
          layer < options.checkpointed_layers.value_or(config.layers)
              ? options.activation_checkpoint
              : ActivationCheckpoint::none),
      recompute_(
          {.preserve_rng = false, .keep_attention = options.keep_attention}),
      in_token_runs_(options.mlp_chunk_tokens > 0) {
  const bool norms_before = config.block.norms != NormPlacement::after;
  if (norms_before) {
    input_layernorm_ = register_module(
        "input_layernorm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
  self_attn_ = register_module(
      "self_attn",
      LlamaAttention(config, layer, std::move(rope), options));
  if (norms_before) {
    post_attention_layernorm_ = register_module(
        "post_attention_layernorm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
  if (config.has_experts(layer)) {
    moe_ = register_module("mlp", Moe(config, options.moe, loss_gradient));
  } else {
    mlp_ = register_module(
        "mlp",
        LlamaMlp(config, options.ranks, options.mlp_chunk_tokens));
  }
}

at::Tensor LlamaBlockImpl::feed_forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    RoutingRecord* record,
    bool is_result_of_part) {
  nn::RmsNormImpl* const norm = or_null(post_attention_layernorm_);
  return moe_ ? moe_(x, delta, norm, record, is_result_of_part)
              : mlp_(x, delta, norm, is_result_of_part);
}

at::Tensor LlamaBlockImpl::run(
    const at::Tensor& in,
    const std::shared_ptr<RoutingRecord>& record,
    const nn::Documents& documents) {
  // x is `in`; gradients of both its uses meet in the norm's backward.
  const auto [x, attention] =
      self_attn_(in, or_null(input_layernorm_), documents);
  if (checkpoint_ != ActivationCheckpoint::selective) {
    const bool is_full = checkpoint_ == ActivationCheckpoint::full;
    return feed_forward(x, attention, record.get(), is_full);
  }
  if (in_token_runs_) {  // it recomputes each run
    return feed_forward(x + attention, at::Tensor(), record.get(), false);
  }
  return nn::checkpoint(
      *this,
      [this, record](const at::Tensor& y) {
        return feed_forward(y, at::Tensor(), record.get(), true);
      },
      x + attention,
      kNoRng);
}

at::Tensor LlamaBlockImpl::forward(
    const at::Tensor& x,
    const nn::Documents& documents) {
  if (moe_) {
    return run_with_experts(x, documents);
  }
  nn::TensorList inputs{x};
  documents.append_to(inputs);
  nn::RegionOptions options{.constants = self_attn_->constants(x)};
  if (checkpoint_ == ActivationCheckpoint::full) {
    options.recompute = recompute_;
  }
  return nn::region(
      *this,
      "block",
      [this](const nn::TensorList& in) {
        return nn::TensorList{run(in[0], nullptr, nn::Documents::after(in, 1))};
      },
      inputs,
      options)[0];
}

nn::Nodes LlamaBlockImpl::nodes(const nn::Documents& documents) {
  FLATSHARD_CHECK(
      checkpoint_ != ActivationCheckpoint::full,
      usage,
      "a block in pieces: expected activation_checkpoint none or selective; a "
      "schedule recomputes pieces itself (OverlapPlanOptions::recompute)");
  const bool is_selective = checkpoint_ == ActivationCheckpoint::selective;
  nn::Nodes nodes;
  nn::RmsNormImpl* const first = or_null(input_layernorm_);
  nn::RmsNormImpl* const second = or_null(post_attention_layernorm_);
  const std::vector<int> attended = nodes.add(
      "attn",
      {0},
      2,
      {first, self_attn_.get()},
      [=, this](const auto& in) {
        const auto [x, attention] = self_attn_(in[0], first, documents);
        return is_selective ? nn::TensorList{x + attention, at::Tensor()}
                            : nn::TensorList{x, attention};
      });
  if (is_selective) {
    nodes.keep_last();
  }
  if (moe_) {
    const auto record = moe_->new_record(documents);
    nodes.keep(record);
    moe_->append_nodes(
        nodes,
        attended,
        second,
        record.get(),
        /*is_result_of_part=*/true);
  } else {
    nodes.add(
        "mlp",
        attended,
        1,
        {second, mlp_.get()},
        [this, second](const nn::TensorList& in) {
          return nn::TensorList{
              mlp_(in[0], in[1], second, /*is_result_of_part=*/true)};
        });
  }
  return nodes;
}

at::Tensor LlamaBlockImpl::extend(
    const at::Tensor& x,
    KvCache& cache,
    const CacheStep& step) {
  const auto [in, attention] =
      self_attn_->extend(x, or_null(input_layernorm_), cache, step);
  RoutingRecord record;
  return feed_forward(in, attention, &record, /*is_result_of_part=*/false);
}

// No region: the number of rows of an expert is not a static shape.
at::Tensor LlamaBlockImpl::run_with_experts(
    const at::Tensor& x,
    const nn::Documents& documents) {
  const auto record = moe_->new_record(documents);
  if (checkpoint_ != ActivationCheckpoint::full) {
    return run(x, record, documents);
  }
  return nn::checkpoint(
      *this,
      [this, record, documents](const at::Tensor& in) {
        return run(in, record, documents);
      },
      x,
      recompute_);
}

LlamaHeadImpl::LlamaHeadImpl(
    const ModelConfig& config,
    const nn::EmbeddingImpl* tied,
    nn::LossOptions loss,
    nn::TensorParallelPtr ranks)
    : Module("LlamaHead"),
      loss_(std::move(loss)),
      soft_cap_(config.final_soft_cap) {
  loss_.soft_cap = soft_cap_;
  loss_.ranks = std::move(ranks);
  loss_.vocab = config.vocab_size;
  norm_ =
      register_module("norm", nn::RmsNorm(config.dim, norm_options(config)));
  weight_ =
      tied != nullptr
          ? share_parameter("weight", *tied, "weight")
          : declare_parameter(
                "weight",
                {nn::part_of(loss_.ranks, loss_.vocab).size(), config.dim},
                InitSpec::normal(0.0F, init_std(config)));
}

nn::ParameterParts LlamaHeadImpl::parts() const {
  if (!loss_.ranks) {
    return {};
  }
  return {
      {"weight",
       {.dim = 0,
        .whole = loss_.vocab,
        .part = nn::part_of(loss_.ranks, loss_.vocab)}}};
}

at::Tensor LlamaHeadImpl::forward(
    const at::Tensor& hidden,
    const at::Tensor& targets) {
  const at::Tensor normed = nn::gather_sequence(loss_.ranks, norm_(hidden));
  if (!targets.defined()) {
    return nn::soft_capped(
        nn::gather_columns(
            loss_.ranks,
            nn::linear(normed, weight_, {}, {}, context()),
            loss_.vocab),
        soft_cap_);
  }
  return nn::linear_cross_entropy(normed, weight_, targets, loss_, context());
}

LlamaBodyImpl::LlamaBodyImpl(
    const ModelConfig& config,
    const LlamaOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("LlamaBody") {
  const auto rope = std::make_shared<nn::RopeTable>(nn::RopeOptions{
      .head_dim = config.rotary_dim(),
      .theta = config.rope_theta,
      .scaling = config.rope_scaling});
  const auto local_rope = config.local_rope_theta > 0.0
                              ? std::make_shared<nn::RopeTable>(nn::RopeOptions{
                                    .head_dim = config.rotary_dim(),
                                    .theta = config.local_rope_theta})
                              : rope;
  embed_tokens_ = register_module(
      "embed_tokens",
      nn::Embedding(
          config.vocab_size,
          config.dim,
          InitSpec::normal(0.0F, init_std(config)),
          config.scale_embeddings ? std::sqrt(static_cast<double>(config.dim))
                                  : 1.0,
          options.ranks));
  auto list = register_module("layers", std::make_shared<nn::Module>("Layers"));
  for (std::int64_t i = 0; i < config.layers; ++i) {
    LlamaBlock block(
        config,
        i,
        config.block.attention.has_window(i) ? local_rope : rope,
        options,
        loss_gradient);
    list->register_module(std::to_string(i), block.ptr());
    layers_.push_back(block);
  }
}

at::Tensor LlamaBodyImpl::forward(
    const at::Tensor& tokens,
    const nn::Documents& documents) {
  at::Tensor x = embed_tokens_(tokens);
  for (const LlamaBlock& layer : layers_) {
    x = layer(x, documents);
  }
  return x;
}

LlamaImpl::LlamaImpl(ModelConfig config, LlamaOptions options)
    : Module("Llama"), config_(std::move(config)) {
  config_.validate();
  if (options.ranks) {
    check_tensor_parallel(
        config_,
        options.ranks->size(),
        "LlamaOptions::ranks");
    options.moe.ranks = options.ranks;
  }
  if (options.context) {
    check_context_parallel(
        config_,
        options.context->size(),
        options.ranks ? options.ranks->size() : 1,
        "LlamaOptions::context");
    options.moe.context = options.context;
    num_token_parts_ = options.context->num_ranks();
  }
  FLATSHARD_CHECK(
      options.mlp_chunk_tokens == 0 ||
          (config_.moe.num_experts == 0 &&
           options.activation_checkpoint != ActivationCheckpoint::none),
      config,
      "LlamaOptions::mlp_chunk_tokens: expected a model without experts and an "
      "activation_checkpoint of its feed-forward part, got {} experts and {}",
      config_.moe.num_experts,
      options.activation_checkpoint == ActivationCheckpoint::none
          ? "none"
          : "a recompute");
  if (config_.moe.num_experts > 0 &&
      (options.moe.aux_loss > 0 || options.moe.z_loss > 0)) {
    loss_gradient_ = c10::make_intrusive<nn::LossGradient>();
  }
  body_ = register_module("model", LlamaBody(config_, options, loss_gradient_));
  head_ = register_module(
      "lm_head",
      LlamaHead(
          config_,
          config_.tie_embeddings ? body_->embed_tokens().get() : nullptr,
          options.loss,
          options.ranks));
}

at::Tensor LlamaImpl::forward(
    const at::Tensor& tokens,
    const at::Tensor& targets,
    const nn::Documents& documents,
    const at::Tensor& share) {
  FLATSHARD_CHECK(
      tokens.dim() == 2,
      usage,
      "expected tokens [batch, seq], got {}",
      c10::str(tokens.sizes()));
  FLATSHARD_CHECK(
      tokens.size(1) * num_token_parts_ <= config_.max_seq_len,
      usage,
      "expected at most max_seq_len = {} tokens in a sequence, got {}",
      config_.max_seq_len,
      tokens.size(1) * num_token_parts_);
  FLATSHARD_CHECK(
      !documents.defined() ||
          documents.positions.numel() == tokens.numel() * num_token_parts_,
      usage,
      "expected documents of {} tokens, as the batch has, got {}",
      tokens.numel() * num_token_parts_,
      documents.positions.numel());
  return with_loss_gradient(
      head_(body_(tokens, documents), targets),
      targets,
      share);
}

at::Tensor LlamaImpl::embed(const at::Tensor& tokens) {
  return body_->embed_tokens()->forward(tokens);
}

at::Tensor LlamaImpl::head(
    const at::Tensor& hidden,
    const at::Tensor& targets,
    const at::Tensor& share) {
  return with_loss_gradient(head_->forward(hidden, targets), targets, share);
}

at::Tensor LlamaImpl::with_loss_gradient(
    const at::Tensor& result,
    const at::Tensor& targets,
    const at::Tensor& share) const {
  if (!targets.defined()) {
    return result;
  }
  const at::Tensor loss = share.defined() ? result * share : result;
  return loss_gradient_ ? nn::tell_gradient(loss, loss_gradient_) : loss;
}

std::vector<RouterOf> LlamaImpl::routers() {
  std::vector<RouterOf> found;
  for (std::size_t i = 0; i < body_->layers().size(); ++i) {
    if (Moe& moe = body_->layers()[i]->moe()) {
      found.push_back(
          {fmt::format("model.layers.{}.mlp.gate", i), &moe->router()});
    }
  }
  return found;
}

std::vector<std::shared_ptr<nn::Module>> LlamaImpl::unit_modules() {
  std::vector<std::shared_ptr<nn::Module>> units{body_->embed_tokens().ptr()};
  for (const LlamaBlock& layer : body_->layers()) {
    units.push_back(layer.ptr());
  }
  units.push_back(head_.ptr());
  return units;
}

}  // namespace flatshard::models
