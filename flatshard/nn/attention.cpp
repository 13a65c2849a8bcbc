#include "flatshard/nn/attention.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/cuda_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace flatshard::nn {
namespace {

bool cudnn_takes(const at::Tensor& q) {
  const at::ScalarType dtype = q.scalar_type();
  // Its backward adds in the order in which blocks end.
  return !at::globalContext().deterministicAlgorithms() && q.is_cuda() &&
         (dtype == at::kBFloat16 || dtype == at::kHalf) && q.size(-1) <= 128 &&
         q.size(-1) % 8 == 0 && q.size(1) > 1 &&
         at::globalContext().userEnabledCuDNNSDP() &&
         cuda::has_cudnn_attention(q.device());
}

// Returns every kv head once for each query head that reads it.
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t times) {
  const auto b = kv.size(0), t = kv.size(1), h = kv.size(2), d = kv.size(3);
  return kv.unsqueeze(3)
      .expand({b, t, h, times, d})
      .reshape({b, t, h * times, d});
}

// One block of queries at a time, against the keys that its window reaches.
// Arguments and result are [batch, heads, seq, head_dim].
at::Tensor plain_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttentionArgs& args) {
  constexpr std::int64_t kLeastRows = 64, kMostRows = 512;
  const std::int64_t seq = q.size(2);
  const std::int64_t rows = args.window > 0
                                ? std::clamp(args.window, kLeastRows, kMostRows)
                                : kMostRows;
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
    // Not float64's.
    scores = scores.to(at::promote_types(scores.scalar_type(), at::kFloat));
    scores = scores * args.scale;
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
    const at::Tensor weights =
        scores.masked_fill(hidden, -INFINITY).softmax(-1).to(v.scalar_type());
    blocks.push_back(at::matmul(weights, v.narrow(2, first, end - first)));
  }
  return at::cat(blocks, 2);
}

void check_plain(const at::Tensor& q, const AttentionArgs& args) {
  FLATSHARD_CHECK(
      !q.is_cuda() || args.plain,
      config,
      "attention of {} with head_dim {}{}{}: no GPU kernel has this (windows "
      "need 16 bits and a head_dim that is a multiple of 8 up to 256, and no "
      "kernel has soft caps); set model.plain_attention = true to compute it "
      "with plain operations, which are slower and keep all probabilities",
      c10::toString(q.scalar_type()),
      q.size(-1),
      args.window > 0 ? fmt::format(", window {}", args.window) : "",
      args.soft_cap > 0 ? fmt::format(", soft cap {}", args.soft_cap) : "");
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
  std::optional<at::Tensor> offsets;
  if (sequences != nullptr) {
    offsets = sequences->offsets;
  }
  std::optional<std::int64_t> before;  // tokens that one attends to
  std::optional<std::int64_t> after;
  if (args.window > 0) {
    before = args.window - 1;
    after = 0;
  }
  const auto length = [&](const at::Tensor& x) {
    return sequences != nullptr ? sequences->max_length : x.size(1);
  };
  return std::get<0>(at::_flash_attention_forward(
      q,
      k,
      v,
      offsets,
      offsets,
      length(q),
      length(k),
      /*dropout_p=*/0.0,
      /*is_causal=*/true,
      /*return_debug_mask=*/false,
      own_scale(args),
      before,
      after));
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
  if (args.scale == 0.0) {
    args.scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  }
  if (args.window >= q.size(1)) {
    args.window = 0;  // it hides nothing
  }
  const bool has_kernel = args.window == 0 && args.soft_cap == 0.0;
  at::Tensor out;
  if (has_kernel && cudnn_takes(q)) {
    const bool wants_grad =
        at::GradMode::is_enabled() &&
        (q.requires_grad() || k.requires_grad() || v.requires_grad());
    out = std::get<0>(at::_scaled_dot_product_cudnn_attention(
                          q.transpose(1, 2),
                          k.transpose(1, 2),
                          v.transpose(1, 2),
                          /*attn_bias=*/std::nullopt,
                          /*compute_log_sumexp=*/wants_grad,
                          /*dropout_p=*/0.0,
                          /*is_causal=*/true,
                          /*return_debug_mask=*/false,
                          own_scale(wanted)))
              .transpose(1, 2);
  } else if (
      args.soft_cap == 0.0 && (args.window > 0 || q.size(3) > 128) &&
      flash_attention_takes(q)) {
    out = flash_attention(q, k, v, args);
  } else {
    // ATen's CPU kernel wants equal head counts. On CUDA its choice may too.
    const std::int64_t group = q.size(2) / k.size(2);
    const at::Tensor ks = group > 1 ? repeat_heads(k, group) : k;
    const at::Tensor vs = group > 1 ? repeat_heads(v, group) : v;
    if (has_kernel) {
      out = at::scaled_dot_product_attention(
          q.transpose(1, 2),
          ks.transpose(1, 2),
          vs.transpose(1, 2),
          /*attn_mask=*/{},
          /*dropout_p=*/0.0,
          /*is_causal=*/true,
          own_scale(wanted));
    } else {
      check_plain(q, args);
      out = plain_attention(
          q.transpose(1, 2),
          ks.transpose(1, 2),
          vs.transpose(1, 2),
          args);
    }
    out = out.transpose(1, 2);
  }
  return out.reshape({q.size(0), q.size(1), -1});
}

}  // namespace flatshard::nn
