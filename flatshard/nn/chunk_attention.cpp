// Attention of adjacent tokens to themselves and to the tokens before them.
#include "flatshard/nn/attention_kernels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace flatshard::nn {
namespace {

// Plain operations on one block of queries at a time, in float32 or float64.
// The backward computes the scores again.
class PlainChunk : public AttentionKernel {
 public:
  PlainChunk(AttentionArgs args, QueryChunk chunk)
      : args_(std::move(args)), chunk_(std::move(chunk)) {}

  const char* name() const override { return "plain attention of a chunk"; }

  TensorList forward(const TensorList& in) const override {
    const Heads heads = heads_of(in);
    TensorList outs, logsumexps;
    for_each_block(heads, in, [&](const Block& block) {
      at::Tensor logsumexp = block.scores.logsumexp(-1);
      if (in.size() > kSinks) {
        logsumexp = at::logaddexp(logsumexp, sinks_of(heads, in));
      }
      const at::Tensor weights =
          (block.scores - logsumexp.unsqueeze(-1)).exp_();
      outs.push_back(at::matmul(weights, block.v));
      logsumexps.push_back(logsumexp);
    });
    return {by_token(at::cat(outs, 2), in[kQ]), at::cat(logsumexps, 2)};
  }

  // Source: the softmax's gradient by its logsumexp, Dao et al.,
  // arXiv:2205.14135.
  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const Heads heads = heads_of(in);
    const at::Tensor out_grad = by_head(grad, heads);
    // For each query the sum of its weights times their gradients.
    const at::Tensor dots = (out_grad * by_head(results[0], heads)).sum(-1);
    const at::Tensor& logsumexp = results[1];
    TensorList dq;
    const at::Tensor dk = at::zeros_like(heads.k), dv = at::zeros_like(heads.v);
    for_each_block(heads, in, [&](const Block& block) {
      const auto of = [&](const at::Tensor& x) {
        return x.narrow(2, block.begin, block.q.size(2));
      };
      const at::Tensor g = of(out_grad);
      const at::Tensor weights =
          (block.scores - of(logsumexp).unsqueeze(-1)).exp_();
      at::Tensor ds = weights * (at::matmul(g, block.v.transpose(-2, -1)) -
                                 of(dots).unsqueeze(-1));
      if (args_.soft_cap > 0) {
        ds = ds * (1 - block.capped * block.capped);
      }
      ds = ds * scale(in);
      dq.push_back(at::matmul(ds, block.k));
      const auto add = [&](const at::Tensor& to, const at::Tensor& addends) {
        to.narrow(2, block.first, block.k.size(2))
            .add_(addends.sum(1, /*keepdim=*/true));
      };
      add(dk, at::matmul(ds.transpose(-2, -1), block.q));
      add(dv, at::matmul(weights.transpose(-2, -1), g));
    });
    TensorList grads{
        by_token(at::cat(dq, 2), in[kQ]),
        by_token(dk, in[kK]),
        by_token(dv, in[kV])};
    if (in.size() > kSinks) {
      const at::Tensor weights = (sinks_of(heads, in) - logsumexp).exp();
      grads.push_back((weights * dots)
                          .sum(-1)
                          .neg()
                          .flatten()
                          .to(in[kSinks].scalar_type()));
    }
    return grads;
  }

 private:
  // [kv_heads, q's heads of each, tokens, head_dim], float32 or more.
  struct Heads {
    at::Tensor q, k, v;
  };
  struct Block {
    std::int64_t begin;  ///< of its queries, in the chunk
    std::int64_t first;  ///< of its keys, among all tokens
    at::Tensor q, k, v;
    at::Tensor scores;  ///< [kv_heads, q's heads of each, queries, keys]
    at::Tensor capped;  ///< tanh of the scores; undefined without soft_cap
  };

  static at::Tensor by_head(const at::Tensor& x, const Heads& heads) {
    return by_head(x, heads.k.size(0));
  }
  static at::Tensor by_head(const at::Tensor& x, std::int64_t kv_heads) {
    return x.to(at::promote_types(x.scalar_type(), at::kFloat))
        .unflatten(1, {kv_heads, x.size(1) / kv_heads})
        .permute({1, 2, 0, 3});
  }
  static at::Tensor by_token(const at::Tensor& x, const at::Tensor& like) {
    return x.permute({2, 0, 1, 3}).flatten(1, 2).to(like.scalar_type());
  }
  static Heads heads_of(const TensorList& in) {
    const std::int64_t kv_heads = in[kK].size(1);
    return {
        by_head(in[kQ], kv_heads),
        by_head(in[kK], kv_heads),
        by_head(in[kV], kv_heads)};
  }
  // [kv_heads, q's heads of each, 1]
  static at::Tensor sinks_of(const Heads& heads, const TensorList& in) {
    return in[kSinks]
        .to(heads.q.scalar_type())
        .view({heads.q.size(0), heads.q.size(1), 1});
  }
  double scale(const TensorList& in) const {
    return own_scale(args_).value_or(
        1.0 / std::sqrt(static_cast<double>(in[kQ].size(2))));
  }

  void for_each_block(
      const Heads& heads,
      const TensorList& in,
      const std::function<void(const Block&)>& visit) const {
    constexpr std::int64_t kRows = 512;
    const TokenRange& chunk = chunk_.tokens;
    const at::Tensor tokens = at::arange(chunk.end, chunk_.offsets.options());
    const at::Tensor document = at::searchsorted(
        chunk_.offsets,
        tokens,
        /*out_int32=*/true,
        /*right=*/true);
    for (std::int64_t begin = 0; begin < chunk.size(); begin += kRows) {
      const std::int64_t count = std::min(kRows, chunk.size() - begin);
      const std::int64_t end = chunk.begin + begin + count;
      const std::int64_t first =
          args_.window > 0
              ? std::max<std::int64_t>(0, end - count - args_.window + 1)
              : 0;
      const auto keys = [&](const at::Tensor& x) {
        return x.narrow(2, first, end - first);
      };
      Block block{
          .begin = begin,
          .first = first,
          .q = heads.q.narrow(2, begin, count),
          .k = keys(heads.k),
          .v = keys(heads.v)};
      block.scores =
          at::matmul(block.q, block.k.transpose(-2, -1)).mul_(scale(in));
      if (args_.soft_cap > 0) {
        block.capped = (block.scores / args_.soft_cap).tanh_();
        block.scores = block.capped * args_.soft_cap;
      }
      const auto pairs = [&](const at::Tensor& of) {
        return std::pair{
            of.narrow(0, end - count, count).unsqueeze(1),
            of.narrow(0, first, end - first)};
      };
      const auto [query, key] = pairs(tokens);
      const at::Tensor distance = query - key;
      at::Tensor hidden = distance.lt(0);
      if (args_.window > 0) {
        hidden.logical_or_(distance.ge(args_.window));
      }
      const auto [document_of_query, document_of_key] = pairs(document);
      hidden.logical_or_(document_of_query.ne(document_of_key));
      block.scores = block.scores.masked_fill(hidden, -INFINITY);
      visit(block);
    }
  }

  AttentionArgs args_;
  QueryChunk chunk_;
};

}  // namespace

AttentionKernelPtr
chunk_kernel(const at::Tensor& q, const AttentionArgs& args, QueryChunk chunk) {
  if (args.soft_cap > 0 || !flash_attention_takes(q)) {
    check_plain(q, args);
    return c10::make_intrusive<PlainChunk>(args, std::move(chunk));
  }
  // Documents before the chunk have keys and no queries, so the kernel sets
  // their gradients to 0. Documents after it have neither.
  const auto [begin, end] = chunk.tokens;
  return flash_kernel(
      {.scale = own_scale(args),
       .window = args.window,
       .sequences =
           FlashSequences{
               chunk.offsets.clamp(begin, end) - begin,
               std::min(chunk.max_length, end - begin)},
       .keys = FlashSequences{
           chunk.offsets.clamp_max(end),
           std::min(chunk.max_length, end)}});
}

}  // namespace flatshard::nn
