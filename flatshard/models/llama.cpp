#include "flatshard/models/llama.h"

#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/swiglu.h"

#include <string>
#include <utility>

namespace flatshard::models {
namespace {

// Nothing in a Llama draws random numbers.
constexpr nn::RecomputeOptions kNoRng{.preserve_rng = false};

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(
    const ModelConfig& config,
    SharedRope rope)
    : Module("LlamaAttention"),
      head_dim_(config.head_dim),
      rope_(std::move(rope)) {
  const std::int64_t q = config.heads * config.head_dim;
  const std::int64_t kv = config.kv_heads * config.head_dim;
  q_proj_ = register_module(
      "q_proj",
      nn::Linear(config.dim, q, plain_linear(config)));
  k_proj_ = register_module(
      "k_proj",
      nn::Linear(config.dim, kv, plain_linear(config)));
  v_proj_ = register_module(
      "v_proj",
      nn::Linear(config.dim, kv, plain_linear(config)));
  o_proj_ = register_module(
      "o_proj",
      nn::Linear(q, config.dim, residual_linear(config)));
  if (config.block.attention.qk_norm == QkNorm::head) {
    q_norm_ = register_module(
        "q_norm",
        nn::RmsNorm(config.head_dim, config.norm_eps));
    k_norm_ = register_module(
        "k_norm",
        nn::RmsNorm(config.head_dim, config.norm_eps));
  }
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::forward(
    const at::Tensor& x,
    nn::RmsNormImpl* norm) {
  const nn::TensorList out = nn::region(
      *this,
      "attn",
      [this, norm](const nn::TensorList& in) {
        const auto [y, attention] = attend(in[0], *norm);
        return nn::TensorList{y, attention};
      },
      {x},
      {.constants = constants(x)});
  return {out[0], out[1]};
}

nn::TensorList LlamaAttentionImpl::constants(const at::Tensor& x) {
  const auto [cos, sin] = rope_->get(x.size(1), x.device());
  return {cos, sin};
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::attend(
    const at::Tensor& x,
    nn::RmsNormImpl& norm) {
  const std::int64_t batch = x.size(0);
  const std::int64_t seq = x.size(1);
  const auto heads = [&](const at::Tensor& t) {
    return t.view({batch, seq, -1, head_dim_});
  };
  const auto [cos, sin] = rope_->get(seq, x.device());
  const auto [in, qkv] = nn::norm_linears(
      x,
      {},
      norm,
      {q_proj_.get(), k_proj_.get(), v_proj_.get()});
  const auto normed = [](const nn::RmsNorm& norm_of, const at::Tensor& t) {
    return norm_of ? norm_of(t) : t;
  };
  const at::Tensor q = nn::rope(normed(q_norm_, heads(qkv[0])), cos, sin);
  const at::Tensor k = nn::rope(normed(k_norm_, heads(qkv[1])), cos, sin);
  return {in, o_proj_(nn::causal_attention(q, k, heads(qkv[2])))};
}

LlamaMlpImpl::LlamaMlpImpl(const ModelConfig& config) : Module("LlamaMlp") {
  gate_proj_ = register_module(
      "gate_proj",
      nn::Linear(config.dim, config.ffn_dim, plain_linear(config)));
  up_proj_ = register_module(
      "up_proj",
      nn::Linear(config.dim, config.ffn_dim, plain_linear(config)));
  down_proj_ = register_module(
      "down_proj",
      nn::Linear(config.ffn_dim, config.dim, residual_linear(config)));
}

at::Tensor LlamaMlpImpl::forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    nn::RmsNormImpl* norm) {
  nn::TensorList inputs{x};
  if (delta.defined()) {
    inputs.push_back(delta);
  }
  return nn::region(
      *this,
      "mlp",
      [this, norm](const nn::TensorList& in) {
        const at::Tensor delta = in.size() > 1 ? in[1] : at::Tensor();
        const auto [sum, outs] = nn::norm_linears(
            in[0],
            delta,
            *norm,
            {gate_proj_.get(), up_proj_.get()});
        return nn::TensorList{
            nn::swiglu_linear(outs[0], outs[1], *down_proj_, sum)};
      },
      inputs)[0];
}

LlamaBlockImpl::LlamaBlockImpl(
    const ModelConfig& config,
    std::int64_t layer,
    SharedRope rope,
    const LlamaOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("LlamaBlock"), checkpoint_(options.activation_checkpoint) {
  input_layernorm_ = register_module(
      "input_layernorm",
      nn::RmsNorm(config.dim, config.norm_eps));
  self_attn_ =
      register_module("self_attn", LlamaAttention(config, std::move(rope)));
  post_attention_layernorm_ = register_module(
      "post_attention_layernorm",
      nn::RmsNorm(config.dim, config.norm_eps));
  if (config.has_experts(layer)) {
    moe_ = register_module("mlp", Moe(config, options.moe, loss_gradient));
  } else {
    mlp_ = register_module("mlp", LlamaMlp(config));
  }
}

at::Tensor LlamaBlockImpl::feed_forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    RoutingRecord* record) {
  return moe_ ? moe_(x, delta, post_attention_layernorm_.get(), record)
              : mlp_(x, delta, post_attention_layernorm_.get());
}

at::Tensor LlamaBlockImpl::run(
    const at::Tensor& in,
    const std::shared_ptr<RoutingRecord>& record) {
  // x is `in`; gradients of both its uses meet in the norm's backward.
  const auto [x, attention] = self_attn_(in, input_layernorm_.get());
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

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x) {
  if (moe_) {
    return run_with_experts(x);
  }
  nn::RegionOptions options{.constants = self_attn_->constants(x)};
  if (checkpoint_ == ActivationCheckpoint::full) {
    options.recompute = kNoRng;
  }
  return nn::region(
      *this,
      "block",
      [this](const nn::TensorList& in) {
        return nn::TensorList{run(in[0], nullptr)};
      },
      {x},
      options)[0];
}

// No region: how many rows an expert has is no shape.
at::Tensor LlamaBlockImpl::run_with_experts(const at::Tensor& x) {
  const auto record = std::make_shared<RoutingRecord>();
  if (checkpoint_ != ActivationCheckpoint::full) {
    return run(x, record);
  }
  return nn::checkpoint(
      *this,
      [this, record](const at::Tensor& in) { return run(in, record); },
      x,
      kNoRng);
}

LlamaHeadImpl::LlamaHeadImpl(
    const ModelConfig& config,
    const nn::EmbeddingImpl* tied,
    nn::LossOptions loss)
    : Module("LlamaHead"), loss_(loss) {
  norm_ = register_module("norm", nn::RmsNorm(config.dim, config.norm_eps));
  weight_ = tied != nullptr ? share_parameter("weight", *tied, "weight")
                            : declare_parameter(
                                  "weight",
                                  {config.vocab_size, config.dim},
                                  InitSpec::normal(0.0F, init_std(config)));
}

at::Tensor LlamaHeadImpl::forward(
    const at::Tensor& hidden,
    const at::Tensor& targets) {
  const at::Tensor normed = norm_(hidden);
  if (!targets.defined()) {
    return nn::linear(normed, weight_, {}, {}, context());
  }
  return nn::linear_cross_entropy(normed, weight_, targets, loss_, context());
}

LlamaBodyImpl::LlamaBodyImpl(
    const ModelConfig& config,
    SharedRope rope,
    const LlamaOptions& options,
    const nn::LossGradientPtr& loss_gradient)
    : Module("LlamaBody") {
  embed_tokens_ = register_module(
      "embed_tokens",
      nn::Embedding(
          config.vocab_size,
          config.dim,
          InitSpec::normal(0.0F, init_std(config))));
  auto list = register_module("layers", std::make_shared<nn::Module>("Layers"));
  for (std::int64_t i = 0; i < config.layers; ++i) {
    LlamaBlock block(config, i, rope, options, loss_gradient);
    list->register_module(std::to_string(i), block.ptr());
    layers_.push_back(block);
  }
}

at::Tensor LlamaBodyImpl::forward(const at::Tensor& tokens) {
  at::Tensor x = embed_tokens_(tokens);
  for (const LlamaBlock& layer : layers_) {
    x = layer(x);
  }
  return x;
}

LlamaImpl::LlamaImpl(ModelConfig config, LlamaOptions options)
    : Module("Llama"), config_(std::move(config)) {
  config_.validate();
  const auto rope = std::make_shared<nn::RopeTable>(nn::RopeOptions{
      .head_dim = config_.head_dim,
      .theta = config_.rope_theta,
      .scaling = config_.rope_scaling});
  if (config_.moe.num_experts > 0 &&
      (options.moe.aux_loss > 0 || options.moe.z_loss > 0)) {
    loss_gradient_ = c10::make_intrusive<nn::LossGradient>();
  }
  body_ = register_module(
      "model",
      LlamaBody(config_, rope, options, loss_gradient_));
  head_ = register_module(
      "lm_head",
      LlamaHead(
          config_,
          config_.tie_embeddings ? body_->embed_tokens().get() : nullptr,
          options.loss));
}

at::Tensor LlamaImpl::forward(
    const at::Tensor& tokens,
    const at::Tensor& targets) {
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
  return with_loss_gradient(head_(body_(tokens), targets), targets);
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
