// The layers of a block: attention and the feed-forward part.
#include "flatshard/core/error.h"
#include "flatshard/models/init.h"
#include "flatshard/models/llama.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/nn/region.h"
#include "flatshard/nn/second_run.h"
#include "flatshard/nn/swiglu.h"

#include <cmath>
#include <initializer_list>
#include <utility>

namespace flatshard::models {
namespace {

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

// Returns the layers' results of the norm of x + delta, or of the sum itself
// without a norm.
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

}  // namespace

LlamaAttentionImpl::LlamaAttentionImpl(
    const ModelConfig& config,
    std::int64_t layer,
    SharedRope rope,
    const LlamaOptions& options)
    : Module("LlamaAttention"),
      heads_(config.heads),
      head_dim_(config.head_dim),
      ranks_(options.ranks),
      token_ranks_(options.context),
      qk_norm_(config.block.attention.qk_norm),
      args_(attention_args(config, layer, options.plain_attention)),
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
  if (attention.sinks) {
    sinks_ = declare_parameter(
        "sinks",
        {nn::part_of(ranks_, heads_).size()},
        InitSpec::normal(0.0F, init_std(config)));
  }
  if (qk_norm_ != QkNorm::none) {
    const bool head = qk_norm_ == QkNorm::head;
    nn::RmsNormOptions norm = norm_options(config);
    norm.ranks = head ? nullptr : ranks_;  // heads are not split
    q_norm_ =
        register_module("q_norm", nn::RmsNorm(head ? head_dim_ : q, norm));
    k_norm_ =
        register_module("k_norm", nn::RmsNorm(head ? head_dim_ : kv, norm));
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
  nn::TensorList constants = rope_->constants(whole_seq(x.size(1)), x.device());
  append_samples(constants, {&q_proj_, &k_proj_, &v_proj_, &o_proj_});
  return constants;
}

nn::ParameterParts LlamaAttentionImpl::parts() const {
  if (!ranks_ || !sinks_.defined()) {
    return {};
  }
  return {
      {"sinks",
       {.dim = 0, .whole = heads_, .part = nn::part_of(ranks_, heads_)}}};
}

nn::AttentionArgs LlamaAttentionImpl::args(const nn::IndexPart& heads) const {
  nn::AttentionArgs args = args_;
  args.sinks = sinks_;
  if (sinks_.defined() && heads.size() < sinks_.size(0)) {
    args.sinks = sinks_.narrow(0, heads.begin, heads.size());
  }
  return args;
}

LlamaAttentionImpl::Heads LlamaAttentionImpl::project(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    const Rotation& rotation) {
  const auto heads = [&](const at::Tensor& t) {
    return t.view({t.size(0), t.size(1), -1, head_dim_});
  };
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
  const auto rotated = [&](const at::Tensor& t) {
    return nn::rope(
        t,
        rotation.cos,
        rotation.sin,
        /*inverse=*/false,
        rotation.rows);
  };
  return {
      .residual = in,
      .q = rotated(normed(qkv[0], q_norm_)),
      .k = rotated(normed(qkv[1], k_norm_)),
      .v = heads(qkv[2])};
}

LlamaAttentionImpl::Rotation LlamaAttentionImpl::rotation_of(
    const at::Tensor& x,
    const nn::Documents& documents) {
  const std::int64_t seq = whole_seq(x.size(1));
  const auto numbers = [&] {
    return at::arange(x.size(0) * seq, x.options().dtype(at::kInt));
  };
  if (documents.defined() && rope_->depends_on_length(seq)) {
    const auto [cos, sin] = rope_->of_documents(documents);
    return {cos, sin, nn::own_rows(token_ranks_, numbers())};
  }
  const auto [cos, sin] = rope_->get(seq, x.device());
  if (documents.defined()) {
    return {cos, sin, nn::own_rows(token_ranks_, documents.positions)};
  }
  if (token_ranks_) {
    return {cos, sin, nn::own_rows(token_ranks_, numbers().remainder_(seq))};
  }
  return {cos, sin, at::Tensor()};
}

at::Tensor LlamaAttentionImpl::output(const at::Tensor& attended) {
  const at::Tensor out = o_proj_(attended);
  return post_norm_ ? post_norm_(out) : out;
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::attend(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    const nn::Documents& documents) {
  const auto [in, q, k, v] = project(x, norm, rotation_of(x, documents));
  const auto attended = nn::attend_shared_tokens(
      token_ranks_,
      q,
      k,
      v,
      [&](const nn::HeadGroup& heads) {
        const nn::AttentionArgs own = args(heads.part);
        if (token_ranks_ && token_ranks_->hosts()) {
          return nn::attend_over_hosts(
              token_ranks_->hosts(),
              heads.q,
              heads.k,
              heads.v,
              documents,
              own);
        }
        return documents.defined()
                   ? nn::document_attention(
                         heads.q,
                         heads.k,
                         heads.v,
                         documents,
                         own)
                   : nn::causal_attention(heads.q, heads.k, heads.v, own);
      });
  return {in, output(attended)};
}

std::tuple<at::Tensor, at::Tensor> LlamaAttentionImpl::extend(
    const at::Tensor& x,
    nn::RmsNormImpl* norm,
    KvCache& cache,
    const CacheStep& step) {
  FLATSHARD_CHECK(
      !ranks_ && !token_ranks_,
      usage,
      "keys and values of layers or tokens that ranks share are not supported; "
      "load the weights on one rank");
  const auto [cos, sin] = rope_->get(step.length, x.device());
  const auto [in, q, k, v] = project(x, norm, {cos, sin, step.positions});
  return {in, output(cache.attend(q, k, v, args({0, q.size(2)}), step))};
}

LlamaMlpImpl::LlamaMlpImpl(
    const ModelConfig& config,
    const nn::TensorParallelPtr& ranks,
    std::int64_t run_tokens)
    : Module("LlamaMlp"),
      activation_(config.block.activation),
      run_tokens_(run_tokens) {
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
    nn::RmsNormImpl* norm,
    bool is_result_of_part) {
  const auto [sum, outs] =
      read_by(x, delta, norm, {gate_proj_.get(), up_proj_.get()});
  if (!post_norm_) {
    return nn::gated_linear(
        activation_,
        outs[0],
        outs[1],
        *down_proj_,
        sum,
        is_result_of_part && nn::in_second_run());
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
    nn::RmsNormImpl* norm,
    bool is_result_of_part) {
  set_result_unread(is_result_of_part && nn::in_second_run());
  nn::TensorList inputs{x};
  if (delta.defined()) {
    inputs.push_back(delta);
  }
  const auto of_part = [this, norm](bool is_result) {
    return [this, norm, is_result](const nn::TensorList& in) {
      const at::Tensor delta = in.size() > 1 ? in[1] : at::Tensor();
      return nn::TensorList{run(in[0], delta, norm, is_result)};
    };
  };
  if (run_tokens_ > 0) {
    nn::TokenRunsOptions options{
        .tokens = run_tokens_,
        .is_result_of_part = is_result_of_part};
    if (norm != nullptr) {
      options.others.push_back(norm);
    }
    // Each run of tokens is a part itself.
    return nn::in_token_runs(*this, of_part(true), inputs, options);
  }
  nn::TensorList constants;
  append_samples(constants, {&gate_proj_, &up_proj_, &down_proj_});
  return nn::region(
      *this,
      "mlp",
      of_part(is_result_of_part),
      inputs,
      {.constants = constants})[0];
}

}  // namespace flatshard::models
