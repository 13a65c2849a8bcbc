#include "flatshard/nn/attention.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/attention_kernels.h"
#include "flatshard/ops/cuda_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace flatshard::nn {
namespace {

bool cudnn_takes(const at::Tensor& q) {
  const at::ScalarType dtype = q.scalar_type();
  // Its backward adds in the order that blocks finish.
  return !at::globalContext().deterministicAlgorithms() && q.is_cuda() &&
         (dtype == at::kBFloat16 || dtype == at::kHalf) && q.size(-1) <= 128 &&
         q.size(-1) % 8 == 0 && q.size(1) > 1 &&
         at::globalContext().userEnabledCuDNNSDP() &&
         cuda::has_cudnn_attention(q.device());
}

// Returns every kv head once for each query head that reads it.
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t times) {
  if (times == 1) {
    return kv;
  }
  const auto b = kv.size(0), t = kv.size(1), h = kv.size(2), d = kv.size(3);
  return kv.unsqueeze(3)
      .expand({b, t, h, times, d})
      .reshape({b, t, h * times, d});
}

// One block of queries at a time, against the keys that its window reaches.
// Arguments and result are [batch, heads, seq, head_dim].
at::Tensor attention_by_blocks(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args,
    const at::Tensor& document) {
  constexpr std::int64_t kLeastRows = 64, kMostRows = 512;
  const std::int64_t seq = q.size(2);
  const std::int64_t rows = args.window > 0
                                ? std::clamp(args.window, kLeastRows, kMostRows)
                                : kMostRows;
  const double scale =
      own_scale(args).value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const at::Tensor positions = at::arange(seq, q.options().dtype(at::kLong));
  std::vector<at::Tensor> blocks;
  for (std::int64_t begin = 0; begin < seq; begin += rows) {
    const std::int64_t end = std::min(seq, begin + rows);
    const std::int64_t first =
        args.window > 0 ? std::max<std::int64_t>(0, begin - args.window + 1)
                        : 0;
    at::Tensor scores = at::matmul(
        q.narrow(2, begin, end - begin),
        k.narrow(2, first, end - first).transpose(2, 3));
    // float64 scores stay float64.
    scores = scores.to(at::promote_types(scores.scalar_type(), at::kFloat));
    scores = scores * scale;
    if (args.soft_cap > 0) {
      scores = (scores / args.soft_cap).tanh() * args.soft_cap;
    }
    const at::Tensor before =
        positions.narrow(0, begin, end - begin).unsqueeze(1) -
        positions.narrow(0, first, end - first);
    at::Tensor hidden = before.lt(0);
    if (args.window > 0) {
      hidden = hidden.logical_or_(before.ge(args.window));
    }
    if (document.defined()) {
      const auto of = [&](std::int64_t from) {
        return document.narrow(1, from, end - from).unsqueeze(1);
      };
      hidden =
          of(begin).unsqueeze(3).ne(of(first).unsqueeze(2)).logical_or_(hidden);
    }
    const at::Tensor weights =
        softmax_with_sinks(scores.masked_fill(hidden, -INFINITY), args.sinks)
            .to(v.scalar_type());
    blocks.push_back(at::matmul(weights, v.narrow(2, first, end - first)));
  }
  return at::cat(blocks, 2);
}

at::Tensor attention_of_aten(
    const TensorList& qkv,
    std::optional<double> scale) {
  if (const auto kernel = aten_kernel(qkv, scale, needs_logsumexp(qkv))) {
    return run_attention(kernel, qkv);
  }
  return at::scaled_dot_product_attention(
             qkv[0].transpose(1, 2),
             qkv[1].transpose(1, 2),
             qkv[2].transpose(1, 2),
             /*attn_mask=*/{},
             /*dropout_p=*/0.0,
             /*is_causal=*/true,
             scale)
      .transpose(1, 2);
}

}  // namespace

bool flash_attention_takes(const at::Tensor& q) {
  const at::ScalarType dtype = q.scalar_type();
  return q.is_cuda() && (dtype == at::kBFloat16 || dtype == at::kHalf) &&
         q.size(-1) <= 256 && q.size(-1) % 8 == 0 &&
         at::globalContext().userEnabledFlashSDP();
}

at::Tensor flash_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args,
    const FlashSequences* sequences) {
  FlashOptions options{.scale = own_scale(args), .window = args.window};
  if (sequences != nullptr) {
    options.sequences = *sequences;
  }
  TensorList inputs{q, k, v};
  if (args.sinks.defined()) {
    inputs.push_back(args.sinks);
  }
  return run_attention(flash_kernel(std::move(options)), inputs);
}

at::Tensor softmax_with_sinks(
    const at::Tensor& scores,
    const at::Tensor& sinks) {
  if (!sinks.defined()) {
    return scores.softmax(-1);
  }
  std::vector<std::int64_t> sizes = scores.sizes().vec();
  sizes.back() = 1;
  const at::Tensor sink = sinks.to(scores.scalar_type())
                              .view({scores.size(-3), -1, 1})
                              .expand(sizes);
  return at::cat({scores, sink}, -1).softmax(-1).narrow(-1, 0, scores.size(-1));
}

void check_plain(const at::Tensor& q, const AttentionArgs& args) {
  FLATSHARD_CHECK(
      !q.is_cuda() || args.plain,
      config,
      "attention of {} with head_dim {}{}{}{}: no GPU kernel supports this "
      "(windows and sinks require 16 bits and a head_dim that is a multiple "
      "of 8 up to 256, and no kernel supports soft caps); set "
      "model.plain_attention = true to use unfused attention (slower, and "
      "stores all probabilities)",
      c10::toString(q.scalar_type()),
      q.size(-1),
      args.window > 0 ? fmt::format(", window {}", args.window) : "",
      args.soft_cap > 0 ? fmt::format(", soft cap {}", args.soft_cap) : "",
      args.sinks.defined() ? ", sinks" : "");
}

at::Tensor plain_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args,
    const at::Tensor& document) {
  check_plain(q, args);
  const std::int64_t group = q.size(2) / k.size(2);
  return attention_by_blocks(
             q.transpose(1, 2),
             repeat_heads(k, group).transpose(1, 2),
             repeat_heads(v, group).transpose(1, 2),
             args,
             document)
      .transpose(1, 2);
}

std::optional<double> own_scale(const AttentionArgs& args) {
  return args.scale == 0.0 ? std::nullopt : std::optional(args.scale);
}

bool are_grouped_heads(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v) {
  return q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 &&
         q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
         q.size(3) == k.size(3) && q.size(2) % k.size(2) == 0;
}

at::Tensor causal_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& wanted) {
  FLATSHARD_CHECK(
      are_grouped_heads(q, k, v),
      usage,
      "causal_attention: expected q [b, t, h, d] and k, v [b, t, kv, d] with h "
      "a multiple of kv, got {}, {} and {}",
      c10::str(q.sizes()),
      c10::str(k.sizes()),
      c10::str(v.sizes()));
  AttentionArgs args = wanted;
  if (args.window >= q.size(1)) {
    args.window = 0;  // it hides nothing
  }
  const bool has_sinks = args.sinks.defined();
  FLATSHARD_CHECK(
      !has_sinks || args.sinks.sizes() == at::IntArrayRef({q.size(2)}),
      usage,
      "causal_attention: expected sinks of [{}], one for each head of q, got "
      "{}",
      q.size(2),
      c10::str(args.sinks.sizes()));
  const bool has_kernel =
      args.window == 0 && args.soft_cap == 0.0 && !has_sinks;
  at::Tensor out;
  if (has_kernel && cudnn_takes(q)) {
    const TensorList inputs{q, k, v};
    out = run_attention(
        cudnn_kernel(own_scale(args), needs_logsumexp(inputs)),
        inputs);
  } else if (
      args.soft_cap == 0.0 &&
      (args.window > 0 || q.size(3) > 128 || has_sinks) &&
      flash_attention_takes(q)) {
    out = flash_attention(q, k, v, args);
  } else if (!has_kernel) {
    out = plain_attention(q, k, v, args);
  } else {
    // ATen's CPU kernel requires equal head counts. Its CUDA choice may, too.
    const std::int64_t group = q.size(2) / k.size(2);
    out = attention_of_aten(
        {q, repeat_heads(k, group), repeat_heads(v, group)},
        own_scale(args));
  }
  return out.reshape({q.size(0), q.size(1), -1});
}

}  // namespace flatshard::nn
