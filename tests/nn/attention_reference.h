#pragma once

#include <ATen/ATen.h>

#include "flatshard/nn/attention.h"

#include <cmath>

namespace flatshard::nn {

/// Causal attention by its formula, over all pairs of tokens; arguments and
/// result as `causal_attention` has them.
inline at::Tensor attention_by_formula(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args) {
  const std::int64_t seq = q.size(1);
  const auto heads = [&](const at::Tensor& t) {
    return t.repeat_interleave(q.size(2) / t.size(2), 2).transpose(1, 2);
  };
  const double scale =
      args.scale > 0 ? args.scale : 1.0 / std::sqrt(double(q.size(3)));
  at::Tensor scores = at::matmul(heads(q), heads(k).transpose(2, 3)) * scale;
  if (args.soft_cap > 0) {
    scores = args.soft_cap * (scores / args.soft_cap).tanh();
  }
  const at::Tensor position = at::arange(seq);
  const at::Tensor before = position.unsqueeze(1) - position;
  at::Tensor seen = before.ge(0);
  if (args.window > 0) {
    seen = seen.logical_and(before.lt(args.window));
  }
  scores = scores.masked_fill(seen.logical_not(), -INFINITY);
  if (args.sinks.defined()) {
    // One more key, with value 0.
    const at::Tensor sinks = args.sinks.view({1, -1, 1, 1});
    scores =
        at::cat({scores, sinks.expand({q.size(0), q.size(2), seq, 1})}, -1);
  }
  return at::matmul(scores.softmax(-1).narrow(-1, 0, seq), heads(v))
      .transpose(1, 2)
      .reshape({q.size(0), seq, -1});
}

}  // namespace flatshard::nn
