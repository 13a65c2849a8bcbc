#include "flatshard/models/sample.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/core/error.h"

namespace flatshard::models {
namespace {

std::vector<std::int64_t> on_host(const at::Tensor& tokens) {
  const at::Tensor host = tokens.cpu().contiguous();
  const auto* first = host.const_data_ptr<std::int64_t>();
  return {first, first + host.numel()};
}

}  // namespace

void SampleOptions::check() const {
  FLATSHARD_CHECK(
      temperature >= 0.0,
      config,
      "temperature: expected 0 or more, got {}",
      temperature);
  FLATSHARD_CHECK(
      top_k >= 0,
      config,
      "top_k: expected 0 or more, got {}",
      top_k);
  FLATSHARD_CHECK(
      top_p > 0.0 && top_p <= 1.0,
      config,
      "top_p: expected above 0 and at most 1, got {}",
      top_p);
}

std::vector<std::int64_t> draw_tokens(
    const at::Tensor& logits,
    std::span<const double> uniforms,
    const SampleOptions& options) {
  options.check();
  const at::NoGradGuard no_grad;
  if (options.temperature == 0.0) {
    return on_host(logits.argmax(-1));
  }
  FLATSHARD_CHECK(
      static_cast<std::int64_t>(uniforms.size()) == logits.size(0),
      usage,
      "draw_tokens: expected a number for each of {} rows, got {}",
      logits.size(0),
      uniforms.size());
  // Float32 would lose the tail of a cumulative sum of 100,000 probabilities.
  at::Tensor p = (logits.to(at::kDouble) / options.temperature).softmax(-1);
  at::Tensor order;  // token ids in the order of p, if p is sorted
  const std::int64_t vocab = p.size(1);
  if (options.top_k > 0 || options.top_p < 1.0) {
    const std::int64_t kept =
        options.top_k > 0 ? std::min(options.top_k, vocab) : vocab;
    std::tie(p, order) = p.topk(kept);
    p = p / p.sum(-1, /*keepdim=*/true);
  }
  if (options.top_p < 1.0) {
    // The likeliest one always stays.
    p = p.masked_fill((p.cumsum(-1) - p).ge(options.top_p), 0.0);
  }
  const at::Tensor sums = p.cumsum(-1);
  const at::Tensor wanted =
      at::tensor(at::ArrayRef<double>(uniforms.data(), uniforms.size()))
          .to(sums.device())
          .unsqueeze(1) *
      sums.narrow(1, p.size(1) - 1, 1);
  const at::Tensor drawn =
      at::searchsorted(sums, wanted, /*out_int32=*/false, /*right=*/true)
          .clamp_max(p.size(1) - 1);
  return on_host((order.defined() ? order.gather(1, drawn) : drawn).squeeze(1));
}

}  // namespace flatshard::models
