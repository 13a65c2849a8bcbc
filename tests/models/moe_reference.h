#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>

#include "flatshard/models/llama.h"

namespace flatshard::models {

using MoeWeights = std::map<std::string, at::Tensor>;

/// A model with experts written down once more, in plain ATen and float64.
class MoeReference {
 public:
  MoeReference(Llama& model, const MoeOptions& options)
      : c_(model->config()), options_(options) {
    for (const auto& p : nn::named_parameters(*model)) {
      w_[p.name] = p.tensor.detach().to(at::kDouble).requires_grad_();
    }
    for (const RouterOf& of : model->routers()) {
      bias_[of.name] = of.router->bias();
    }
  }

  at::Tensor logits(const at::Tensor& ids) {
    losses_ = at::zeros({}, at::kDouble);
    at::Tensor x = at::embedding(w_.at("model.embed_tokens.weight"), ids);
    for (std::int64_t i = 0; i < c_.layers; ++i) {
      const std::string p = "model.layers." + std::to_string(i) + ".";
      x = x + attention(norm(x, p + "input_layernorm.weight"), p);
      const at::Tensor m = norm(x, p + "post_attention_layernorm.weight");
      x = x + (c_.has_experts(i) ? experts(m, p + "mlp.") : mlp(m, p + "mlp."));
    }
    return at::linear(norm(x, "lm_head.norm.weight"), w_.at("lm_head.weight"));
  }
  // Cross-entropy and what the routers add.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) {
    const at::Tensor cross = at::cross_entropy_loss(
        logits(ids).view({-1, c_.vocab_size}),
        targets.view({-1}));
    cross_ = cross.detach();
    return cross + losses_;
  }
  const at::Tensor& cross_entropy() const { return cross_; }
  const at::Tensor& weight(const std::string& name) const {
    return w_.at(name);
  }

 private:
  at::Tensor norm(const at::Tensor& x, const std::string& name) {
    return x * (x.square().mean(-1, true) + c_.norm_eps).rsqrt() * w_.at(name);
  }
  at::Tensor project(const at::Tensor& x, const std::string& name) {
    return at::linear(x, w_.at(name + ".weight"));
  }
  at::Tensor mlp(const at::Tensor& x, const std::string& p) {
    return project(
        at::silu(project(x, p + "gate_proj")) * project(x, p + "up_proj"),
        p + "down_proj");
  }
  at::Tensor attention(const at::Tensor& x, const std::string& p) {
    const std::int64_t b = x.size(0), t = x.size(1), d = c_.dim / c_.heads;
    const at::Tensor angle = at::outer(
        at::arange(t, at::kDouble),
        at::pow(c_.rope_theta, at::arange(0, d, 2, at::kDouble) / -double(d)));
    const at::Tensor cos = at::cat({angle, angle}, -1).cos();
    const at::Tensor sin = at::cat({angle, angle}, -1).sin();
    const auto heads = [&](const char* name) {
      return project(x, p + "self_attn." + name)
          .view({b, t, -1, d})
          .transpose(1, 2);
    };
    const auto rotated = [&](const char* name, const char* norm_name) {
      at::Tensor q = heads(name);
      if (c_.block.attention.qk_norm == QkNorm::head) {
        q = norm(q, p + "self_attn." + norm_name + ".weight");
      }
      const auto half = q.chunk(2, -1);
      return q * cos + at::cat({-half[1], half[0]}, -1) * sin;
    };
    const std::int64_t n = c_.heads / c_.kv_heads;
    const at::Tensor q = rotated("q_proj", "q_norm");
    const at::Tensor k = rotated("k_proj", "k_norm").repeat_interleave(n, 1);
    const at::Tensor v = heads("v_proj").repeat_interleave(n, 1);
    const at::Tensor hidden_from =
        at::ones({t, t}, at::kBool).tril().logical_not();
    const at::Tensor a =
        (at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(d)))
            .masked_fill(hidden_from, -INFINITY)
            .softmax(-1);
    return project(
        at::matmul(a, v).transpose(1, 2).reshape({b, t, -1}),
        p + "self_attn.o_proj");
  }
  at::Tensor experts(const at::Tensor& in, const std::string& p) {
    const MoeConfig& moe = c_.moe;
    const at::Tensor x = in.reshape({-1, c_.dim});
    const std::int64_t tokens = x.size(0);
    const std::int64_t n = moe.num_experts;
    const at::Tensor logits = project(x, p + "gate");
    const bool softmax = moe.router_score == nn::RouterScore::softmax;
    const at::Tensor scores = softmax ? logits.softmax(-1) : logits.sigmoid();
    at::Tensor choice = scores.detach();
    if (const at::Tensor& bias = bias_.at(p + "gate"); bias.defined()) {
      choice = choice + bias.to(at::kDouble);
    }
    if (moe.router_groups > 1) {
      const at::Tensor in_groups = choice.view({tokens, moe.router_groups, -1});
      const at::Tensor best = std::get<0>(in_groups.topk(2, -1)).sum(-1);
      const at::Tensor kept =
          at::zeros_like(best, at::kBool)
              .scatter_(
                  1,
                  std::get<1>(best.topk(moe.router_kept_groups, -1)),
                  true);
      choice =
          in_groups.masked_fill(kept.logical_not().unsqueeze(-1), -INFINITY)
              .view({tokens, n});
    }
    const at::Tensor chosen =
        std::get<1>(choice.topk(moe.experts_per_token, -1));
    at::Tensor weights = scores.gather(1, chosen);
    if (moe.router_normalize) {
      weights = weights / weights.sum(-1, true);
    }
    weights = weights * moe.router_scale;
    const at::Tensor counts = at::bincount(chosen.flatten(), {}, n);
    const at::Tensor share = counts.to(at::kDouble) / double(chosen.numel());
    const at::Tensor mean =
        (softmax ? scores : scores / scores.sum(-1, true)).mean(0);
    losses_ = losses_ + options_.aux_loss * double(n) * (share * mean).sum() +
              options_.z_loss * logits.logsumexp(-1).square().mean();
    const at::Tensor &gate_up = w_.at(p + "experts.gate_up_proj"),
                     &down = w_.at(p + "experts.down_proj");
    at::Tensor sum = at::zeros_like(x);
    for (std::int64_t e = 0; e < n; ++e) {
      const auto halves = at::linear(x, gate_up[e]).chunk(2, -1);
      const at::Tensor y = at::linear(at::silu(halves[0]) * halves[1], down[e]);
      const at::Tensor factor =
          (weights * chosen.eq(e).to(at::kDouble)).sum(-1, true);
      sum = sum + y * factor;
    }
    if (moe.shared_experts > 0) {
      sum = sum + mlp(x, p + "shared_experts.");
    }
    return sum.view(in.sizes());
  }

  ModelConfig c_;
  MoeOptions options_;
  MoeWeights w_;
  MoeWeights bias_;
  at::Tensor losses_;
  at::Tensor cross_;
};

}  // namespace flatshard::models
