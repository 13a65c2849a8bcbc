#include "flatshard/models/llama.h"

#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/swiglu.h"

#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>

namespace flatshard::models {
namespace {

// Nothing in a Llama draws random numbers.
constexpr nn::RecomputeOptions kNoRng{.preserve_rng = false};

nn::AttentionArgs
attention_args(const ModelConfig& config, std::int64_t layer, bool plain) {
  const AttentionOptions& attention = config.block.attention;
  const double scalar = attention.query_pre_attn_scalar;
  return {
      .scale = scalar > 0.0 ? 1.0 / std::sqrt(scalar) : 0.0,
      .window = attention.has_window(layer) ? attention.window : 0,
      .soft_cap = attention.soft_cap,
      .plain = plain};
}

// What layers make of the norm of x + delta; without a norm of the sum itself.
nn::NormLinears read_by(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm,
    const std::vector<nn::LinearImpl*>& layers) {
  if (norm != nullptr) {
    return nn::norm_linears(x, delta, *norm, layers);
  }
  // Another tensor over x's memory: a region does not return its input.
  const at::Tensor sum = delta.defined() ? x + delta : x.view(x.sizes());
  return {sum, nn::linears(sum, layers)};
}

// The numbers of samples that a dropout of the layers' adapters reads.
void append_samples(
    nn::TensorList& to,
    std::initializer_list<const nn::Linear*> layers) {
  for (const nn::Linear* layer : layers) {
    const nn::Adapter* const adapter = (*layer)->adapter();
    if (adapter != nullptr && adapter->dropout) {
      to.push_back(adapter->dropout->samples());
      return;  // all have the same
    }
  }
}

nn::RmsNormImpl* or_null(const nn::RmsNorm& norm) {
  return norm ? const_cast<nn::RmsNormImpl*>(norm.get()) : nullptr;
}

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(
    const ModelConfig& config,
    std::int64_t layer,
    SharedRope rope,
    bool plain,
    nn::TensorParallelPtr ranks)
    : Module("LlamaAttention"),
      head_dim_(config.head_dim),
      ranks_(std::move(ranks)),
      qk_norm_(config.block.attention.qk_norm),
      args_(attention_args(config, layer, plain)),
      rope_(std::move(rope)) {
  const AttentionOptions& attention = config.block.attention;
  const std::int64_t q = config.heads * config.head_dim;
  const std::int64_t kv = config.kv_heads * config.head_dim;
  const nn::LinearOptions in = plain_linear(config, attention.qkv_bias, ranks_);
  q_proj_ = register_module("q_proj", nn::Linear(config.dim, q, in));
  k_proj_ = register_module("k_proj", nn::Linear(config.dim, kv, in));
  v_proj_ = register_module("v_proj", nn::Linear(config.dim, kv, in));
  o_proj_ = register_module(
      "o_proj",
      nn::Linear(
          q,
          config.dim,
          residual_linear(config, attention.output_bias, ranks_)));
  if (qk_norm_ != QkNorm::none) {
    const bool head = qk_norm_ == QkNorm::head;
    nn::RmsNormOptions options = norm_options(config);
    options.ranks = head ? nullptr : ranks_;  // heads are whole
    q_norm_ =
        register_module("q_norm", nn::RmsNorm(head ? head_dim_ : q, options));
    k_norm_ =
        register_module("k_norm", nn::RmsNorm(head ? head_dim_ : kv, options));
  }
  if (config.block.norms != NormPlacement::before) {
    post_norm_ = register_module(
        "post_norm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::forward(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    const nn::Documents& documents) {
  nn::TensorList inputs{x};
  documents.append_to(inputs);
  const nn::TensorList out = nn::region(
      *this,
      "attn",
      [this, norm](const nn::TensorList& in) {
        const auto [y, attention] =
            attend(in[0], norm, nn::Documents::after(in, 1));
        return nn::TensorList{y, attention};
      },
      inputs,
      {.constants = constants(x)});
  return {out[0], out[1]};
}

nn::TensorList LlamaAttentionImpl::constants(const at::Tensor& x) {
  const auto [cos, sin] = rope_->get(whole_seq(x.size(1)), x.device());
  nn::TensorList constants{cos, sin};
  append_samples(constants, {&q_proj_, &k_proj_, &v_proj_, &o_proj_});
  return constants;
}

LlamaAttentionImpl::Heads LlamaAttentionImpl::project(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    std::int64_t seq,
    const at::Tensor& positions) {
  const auto heads = [&](const at::Tensor& t) {
    return t.view({t.size(0), t.size(1), -1, head_dim_});
  };
  const auto [cos, sin] = rope_->get(seq, x.device());
  const auto [in, qkv] =
      read_by(x, {}, norm, {q_proj_.get(), k_proj_.get(), v_proj_.get()});
  const auto normed = [&](const at::Tensor& t, const nn::RmsNorm& norm_of) {
    switch (qk_norm_) {
      case QkNorm::head:
        return norm_of(heads(t));
      case QkNorm::projection:
        return heads(norm_of(t));
      default:
        return heads(t);
    }
  };
  const auto rotated = [&, &c = cos, &s = sin](const at::Tensor& t) {
    return nn::rope(t, c, s, /*inverse=*/false, positions);
  };
  return {
      .residual = in,
      .q = rotated(normed(qkv[0], q_norm_)),
      .k = rotated(normed(qkv[1], k_norm_)),
      .v = heads(qkv[2])};
}

at::Tensor LlamaAttentionImpl::output(const at::Tensor& attended) {
  const at::Tensor out = o_proj_(attended);
  return post_norm_ ? post_norm_(out) : out;
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::attend(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    const nn::Documents& documents) {
  const auto [in, q, k, v] =
      project(x, norm, whole_seq(x.size(1)), documents.positions);
  return {
      in,
      output(
          documents.defined()
              ? nn::document_attention(q, k, v, documents, args_)
              : nn::causal_attention(q, k, v, args_))};
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::extend(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    KvCache& cache,
    const CacheStep& step) {
  FLATSHARD_CHECK(
      !ranks_,
      usage,
      "keys and values of layers that ranks share are not supported; load the "
      "weights on one rank");
  const auto [in, q, k, v] = project(x, norm, step.length, step.positions);
  return {in, output(cache.attend(q, k, v, args_, step))};
}

LlamaMlpImpl::LlamaMlpImpl(
    const ModelConfig& config,
    const nn::TensorParallelPtr& ranks)
    : Module("LlamaMlp"), activation_(config.block.activation) {
  const bool bias = config.block.mlp_bias;
  const nn::LinearOptions in = plain_linear(config, bias, ranks);
  gate_proj_ =
      register_module("gate_proj", nn::Linear(config.dim, config.ffn_dim, in));
  up_proj_ =
      register_module("up_proj", nn::Linear(config.dim, config.ffn_dim, in));
  down_proj_ = register_module(
      "down_proj",
      nn::Linear(
          config.ffn_dim,
          config.dim,
          residual_linear(config, bias, ranks)));
  if (config.block.norms != NormPlacement::before) {
    post_norm_ = register_module(
        "post_norm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
}

at::Tensor LlamaMlpImpl::run(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm) {
  const auto [sum, outs] =
      read_by(x, delta, norm, {gate_proj_.get(), up_proj_.get()});
  if (!post_norm_) {
    return nn::gated_linear(activation_, outs[0], outs[1], *down_proj_, sum);
  }
  return sum + post_norm_(nn::gated_linear(
                   activation_,
                   outs[0],
                   outs[1],
                   *down_proj_,
                   /*residual=*/{}));
}

at::Tensor LlamaMlpImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm) {
  nn::TensorList inputs{x};
  if (delta.defined()) {
    inputs.push_back(delta);
  }
  nn::TensorList constants;
  append_samples(constants, {&gate_proj_, &up_proj_, &down_proj_});
  return nn::region(
      *this,
      "mlp",
      [this, norm](const nn::TensorList& in) {
        return nn::TensorList{
            run(in[0], in.size() > 1 ? in[1] : at::Tensor(), norm)};
      },
      inputs,
      {.constants = constants})[0];
}

LlamaBlockImpl::LlamaBlockImpl(
    const ModelConfig& config,
    std::int64_t layer,
    SharedRope rope,
    const LlamaOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("LlamaBlock"), checkpoint_(options.activation_checkpoint) {
  const bool norms_before = config.block.norms != NormPlacement::after;
  if (norms_before) {
    input_layernorm_ = register_module(
        "input_layernorm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
  self_attn_ = register_module(
      "self_attn",
      LlamaAttention(
          config,
          layer,
          std::move(rope),
          options.plain_attention,
          options.ranks));
  if (norms_before) {
    post_attention_layernorm_ = register_module(
        "post_attention_layernorm",
        nn::RmsNorm(config.dim, norm_options(config)));
  }
  if (config.has_experts(layer)) {
    moe_ = register_module("mlp", Moe(config, options.moe, loss_gradient));
  } else {
    mlp_ = register_module("mlp", LlamaMlp(config, options.ranks));
  }
}

at::Tensor LlamaBlockImpl::feed_forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    RoutingRecord* record) {
  nn::RmsNormImpl* const norm = or_null(post_attention_layernorm_);
  return moe_ ? moe_(x, delta, norm, record) : mlp_(x, delta, norm);
}

at::Tensor LlamaBlockImpl::run(
    const at::Tensor& in,
    const std::shared_ptr<RoutingRecord>& record,
    const nn::Documents& documents) {
  // x is `in`; gradients of both its uses meet in the norm's backward.
  const auto [x, attention] =
      self_attn_(in, or_null(input_layernorm_), documents);
  if (checkpoint_ != ActivationCheckpoint::selective) {
    return feed_forward(x, attention, record.get());
  }
  return nn::checkpoint(
      *this,
      [this, record](const at::Tensor& y) {
        return feed_forward(y, at::Tensor(), record.get());
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
    options.recompute = kNoRng;
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

nn::Nodes LlamaBlockImpl::nodes(nn::Documents documents) {
  FLATSHARD_CHECK(
      checkpoint_ == ActivationCheckpoint::none,
      usage,
      "a block in pieces: expected activation_checkpoint none; a schedule "
      "recomputes pieces itself (OverlapPlanOptions::recompute)");
  nn::Nodes nodes;
  nn::RmsNormImpl* const first = or_null(input_layernorm_);
  nn::RmsNormImpl* const second = or_null(post_attention_layernorm_);
  const std::vector<int> attended = nodes.add(
      "attn",
      {0},
      2,
      {first, self_attn_.get()},
      [this, first, documents = std::move(documents)](const auto& in) {
        const auto [x, attention] = self_attn_(in[0], first, documents);
        return nn::TensorList{x, attention};
      });
  if (moe_) {
    const auto record = std::make_shared<RoutingRecord>();
    nodes.keep(record);
    moe_->append_nodes(nodes, attended, second, record.get());
  } else {
    nodes.add(
        "mlp",
        attended,
        1,
        {second, mlp_.get()},
        [this, second](const nn::TensorList& in) {
          return nn::TensorList{mlp_(in[0], in[1], second)};
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
  return feed_forward(in, attention, &record);
}

// No region: how many rows an expert has is no shape.
at::Tensor LlamaBlockImpl::run_with_experts(
    const at::Tensor& x,
    const nn::Documents& documents) {
  const auto record = std::make_shared<RoutingRecord>();
  if (checkpoint_ != ActivationCheckpoint::full) {
    return run(x, record, documents);
  }
  return nn::checkpoint(
      *this,
      [this, record, documents](const at::Tensor& in) {
        return run(in, record, documents);
      },
      x,
      kNoRng);
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
    const nn::Documents& documents) {
  FLATSHARD_CHECK(
      tokens.dim() == 2,
      usage,
      "expected tokens [batch, seq], got {}",
      c10::str(tokens.sizes()));
  FLATSHARD_CHECK(
      tokens.size(1) <= config_.max_seq_len,
      usage,
      "expected at most max_seq_len = {} tokens in a sequence, got {}",
      config_.max_seq_len,
      tokens.size(1));
  FLATSHARD_CHECK(
      !documents.defined() || documents.positions.numel() == tokens.numel(),
      usage,
      "expected documents of {} tokens, as the batch has, got {}",
      tokens.numel(),
      documents.positions.numel());
  return with_loss_gradient(head_(body_(tokens, documents), targets), targets);
}

at::Tensor LlamaImpl::embed(const at::Tensor& tokens) {
  return body_->embed_tokens()->forward(tokens);
}

at::Tensor LlamaImpl::head(
    const at::Tensor& hidden,
    const at::Tensor& targets) {
  return with_loss_gradient(head_->forward(hidden, targets), targets);
}

at::Tensor LlamaImpl::with_loss_gradient(
    const at::Tensor& result,
    const at::Tensor& targets) const {
  return loss_gradient_ && targets.defined()
             ? nn::tell_gradient(result, loss_gradient_)
             : result;
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
