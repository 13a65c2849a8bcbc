#include "flatshard/core/error.h"
#include "flatshard/nn/attention_kernels.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/parallel/context_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace flatshard::nn {
namespace {

class HostAttention : public AttentionKernel {
 public:
  HostAttention(
      ContextParallelPtr hosts,
      QueryChunk documents,
      AttentionArgs args,
      std::int64_t num_tokens)
      : hosts_(std::move(hosts)),
        documents_(std::move(documents)),
        args_(std::move(args)),
        chunks_(
            TokenPart{.host = hosts_->rank(), .hosts = hosts_->size()}.of_host(
                num_tokens)) {}

  const char* name() const override { return "attention over hosts"; }

  // The results are out, then what else the kernels of the chunks return.
  TensorList forward(const TensorList& in) const override {
    const auto [k, v] = gather(in);
    TensorList outs, others;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const TensorList results = kernel(in, i)->forward(inputs_of(in, i, k, v));
      outs.push_back(results[0]);
      others.insert(others.end(), results.begin() + 1, results.end());
    }
    others.insert(others.begin(), at::cat(outs).view(in[kQ].sizes()));
    return others;
  }

  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const auto others_each =
        static_cast<std::ptrdiff_t>((results.size() - 1) / chunks_.size());
    TensorList dq;
    at::Tensor dk, dv, sinks;
    {
      const auto [k, v] = gather(in);
      dk = zeros_of_sums(k);
      dv = zeros_of_sums(v);
      for (std::size_t i = 0; i < chunks_.size(); ++i) {
        TensorList of_chunk{rows(results[0], i)};
        const auto others =
            results.begin() + 1 + static_cast<std::ptrdiff_t>(i) * others_each;
        of_chunk.insert(of_chunk.end(), others, others + others_each);
        const TensorList grads = kernel(in, i)->backward(
            rows(grad, i),
            inputs_of(in, i, k, v),
            of_chunk);
        dq.push_back(grads[kQ]);
        dk.narrow(0, 0, chunks_[i].end).add_(grads[kK]);
        dv.narrow(0, 0, chunks_[i].end).add_(grads[kV]);
        if (grads.size() > kSinks && grads[kSinks].defined()) {
          sinks = sinks.defined() ? sinks + grads[kSinks] : grads[kSinks];
        }
      }
    }
    TensorList grads = scatter(std::move(dk), std::move(dv), in);
    grads.insert(grads.begin(), at::cat(dq).view(in[kQ].sizes()));
    if (in.size() > kSinks) {
      grads.push_back(sinks);
    }
    return grads;
  }

 private:
  static at::Tensor flat(const at::Tensor& x) { return x.flatten(0, 1); }

  // A sum of 16-bit gradients is float32.
  static at::Tensor zeros_of_sums(const at::Tensor& x) {
    return at::zeros(
        x.sizes(),
        x.options().dtype(at::promote_types(x.scalar_type(), at::kFloat)));
  }

  /// Returns the rows of a chunk, of a tensor of the host's tokens.
  at::Tensor rows(const at::Tensor& x, std::size_t i) const {
    const std::int64_t each = chunks_[i].size();
    return flat(x).narrow(0, static_cast<std::int64_t>(i) * each, each);
  }

  AttentionKernelPtr kernel(const TensorList& in, std::size_t i) const {
    QueryChunk chunk = documents_;
    chunk.tokens = chunks_[i];
    return chunk_kernel(in[kQ], args_, std::move(chunk));
  }

  TensorList inputs_of(
      const TensorList& in,
      std::size_t i,
      const at::Tensor& k,
      const at::Tensor& v) const {
    const std::int64_t end = chunks_[i].end;
    TensorList inputs{
        rows(in[kQ], i),
        k.narrow(0, 0, end),
        v.narrow(0, 0, end)};
    if (in.size() > kSinks) {
      inputs.push_back(in[kSinks]);
    }
    return inputs;
  }

  /// Returns k and v of all tokens, in the order of the sequence.
  std::pair<at::Tensor, at::Tensor> gather(const TensorList& in) const {
    const std::int64_t n = hosts_->size();
    std::vector<RankBlocks> blocks;
    for (const AttentionInput i : {kK, kV}) {
      const at::Tensor own = flat(in[i]).contiguous().unsqueeze(0);
      std::vector<std::int64_t> sizes = own.sizes().vec();
      sizes[0] = n;
      blocks.push_back(
          {own.expand(sizes),
           at::empty(sizes, own.options()),
           /*is_one=*/true});
    }
    hosts_->start(blocks)->finish();
    return {
        in_order_of_tokens(blocks[0].receive),
        in_order_of_tokens(blocks[1].receive)};
  }

  /// Sends gradients to the owners of the tokens, and adds up what arrives.
  TensorList scatter(at::Tensor dk, at::Tensor dv, const TensorList& in) const {
    std::vector<RankBlocks> blocks;
    for (at::Tensor* x : {&dk, &dv}) {
      const at::Tensor send = in_order_of_hosts(std::exchange(*x, {}));
      blocks.push_back({send, at::empty_like(send)});
    }
    hosts_->start(blocks)->finish();
    TensorList sums;
    for (const AttentionInput i : {kK, kV}) {
      const at::Tensor& parts = blocks[i - kK].receive;
      const at::Tensor sum = parts[0].clone();
      for (std::int64_t host = 1; host < parts.size(0); ++host) {
        sum.add_(parts[host]);
      }
      sums.push_back(sum.to(in[i].scalar_type()).view(in[i].sizes()));
    }
    return sums;
  }

  // [hosts, head and tail, ...] -> [tokens, ...]
  static at::Tensor in_order_of_tokens(const at::Tensor& by_host) {
    const at::Tensor chunks =
        by_host.unflatten(1, {2, by_host.size(1) / 2}).transpose(0, 1);
    return at::cat({chunks[0], chunks[1].flip(0)}).flatten(0, 1);
  }
  // The inverse.
  at::Tensor in_order_of_hosts(const at::Tensor& x) const {
    const at::Tensor chunks =
        x.unflatten(0, {2, hosts_->size(), chunks_[0].size()});
    return at::stack({chunks[0], chunks[1].flip(0)}, 1).flatten(1, 2);
  }

  ContextParallelPtr hosts_;
  QueryChunk documents_;  ///< tokens are not used
  AttentionArgs args_;
  std::vector<TokenRange> chunks_;  ///< of this host: head and tail
};

}  // namespace

at::Tensor attend_over_hosts(
    const ContextParallelPtr& hosts,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const Documents& documents,
    const AttentionArgs& wanted) {
  const std::int64_t num_tokens = q.size(0) * q.size(1) * hosts->size();
  const std::int64_t seq = q.size(1) * hosts->size();
  FLATSHARD_CHECK(
      are_grouped_heads(q, k, v) && num_tokens % (2 * hosts->size()) == 0 &&
          (!documents.defined() || documents.positions.numel() == num_tokens),
      usage,
      "attention over {} hosts: expected q [b, t, h, d] and k, v [b, t, kv, d] "
      "with h a multiple of kv, an even number of tokens, and documents of all "
      "tokens, got {}, {} and {}, and documents of {} tokens",
      hosts->size(),
      c10::str(q.sizes()),
      c10::str(k.sizes()),
      c10::str(v.sizes()),
      documents.defined() ? documents.positions.numel() : num_tokens);
  QueryChunk chunk{
      .offsets = documents.offsets,
      .max_length = documents.max_length};
  if (!documents.defined()) {
    chunk.max_length = seq;
    chunk.offsets =
        at::arange(0, num_tokens + 1, seq, q.options().dtype(at::kInt));
  }
  AttentionArgs args = wanted;
  if (args.window >= seq) {
    args.window = 0;  // it hides nothing
  }
  TensorList inputs{q, k, v};
  if (args.sinks.defined()) {
    // The node saves them as an input.
    inputs.push_back(std::exchange(args.sinks, {}));
  }
  return run_attention(
             c10::make_intrusive<HostAttention>(
                 hosts,
                 std::move(chunk),
                 std::move(args),
                 num_tokens),
             inputs)
      .flatten(2);
}

}  // namespace flatshard::nn
