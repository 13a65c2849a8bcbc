#include "flatshard/nn/attention.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/cuda_ops.h"

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

// Every kv head once for each query head that reads it.
at::Tensor repeat_heads(const at::Tensor& kv, std::int64_t times) {
  const auto b = kv.size(0), t = kv.size(1), h = kv.size(2), d = kv.size(3);
  return kv.unsqueeze(3)
      .expand({b, t, h, times, d})
      .reshape({b, t, h * times, d});
}

}  // namespace

at::Tensor causal_attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v) {
  FLATSHARD_CHECK(
      q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 &&
          q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
          q.size(3) == k.size(3) && q.size(2) % k.size(2) == 0,
      usage,
      "causal_attention: expected q [b, t, h, d] and k, v [b, t, kv, d] with h "
      "a multiple of kv, got {}, {} and {}",
      c10::str(q.sizes()),
      c10::str(k.sizes()),
      c10::str(v.sizes()));
  const std::int64_t group = q.size(2) / k.size(2);
  at::Tensor out;
  if (cudnn_takes(q)) {
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
        /*return_debug_mask=*/false));
  } else {
    // ATen's CPU kernel wants equal head counts; on CUDA its choice may too.
    const at::Tensor ks = group > 1 ? repeat_heads(k, group) : k;
    const at::Tensor vs = group > 1 ? repeat_heads(v, group) : v;
    out = at::scaled_dot_product_attention(
        q.transpose(1, 2),
        ks.transpose(1, 2),
        vs.transpose(1, 2),
        /*attn_mask=*/{},
        /*dropout_p=*/0.0,
        /*is_causal=*/true);
  }
  return out.transpose(1, 2).reshape({q.size(0), q.size(1), -1});
}

}  // namespace flatshard::nn
