#include "flatshard/models/sample.h"

#include "flatshard/core/error.h"

#include <algorithm>

namespace flatshard::models {
namespace {

std::int64_t draw(
    const at::Tensor& row,
    at::Generator& generator,
    const SampleOptions& options) {
  const at::Tensor scores = row.to(at::kCPU).to(at::kFloat);
  if (options.temperature == 0.0) {
    return scores.argmax().item<std::int64_t>();
  }
  at::Tensor p = scores / options.temperature;
  if (options.top_k > 0 && options.top_k < p.numel()) {
    const at::Tensor least =
        std::get<0>(p.topk(options.top_k)).select(0, options.top_k - 1);
    p = p.masked_fill(p.lt(least), -INFINITY);
  }
  p = p.softmax(-1);
  if (options.top_p < 1.0) {
    const auto [sorted, order] = p.sort(/*dim=*/-1, /*descending=*/true);
    // The likeliest one always stays.
    const at::Tensor before = sorted.cumsum(-1) - sorted;
    p = p.index_fill(-1, order.index({before.ge(options.top_p)}), 0.0);
  }
  return p.multinomial(1, /*replacement=*/false, generator)
      .item<std::int64_t>();
}

}  // namespace

std::vector<std::int64_t> sample(
    const LogitsFn& logits,
    const std::vector<std::int64_t>& prompt,
    at::Device device,
    at::Generator generator,
    const SampleOptions& options) {
  FLATSHARD_CHECK(
      !prompt.empty(),
      usage,
      "expected a prompt of at least one token");
  FLATSHARD_CHECK(
      options.temperature >= 0.0,
      config,
      "temperature: expected 0 or more, got {}",
      options.temperature);
  FLATSHARD_CHECK(
      options.max_context > 0 && options.top_k >= 0,
      config,
      "expected max_context > 0 and top_k >= 0, got {} and {}",
      options.max_context,
      options.top_k);
  FLATSHARD_CHECK(
      options.top_p > 0.0 && options.top_p <= 1.0,
      config,
      "top_p: expected above 0 and at most 1, got {}",
      options.top_p);
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> tokens = prompt;
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const auto length = std::min<std::int64_t>(
        options.max_context,
        static_cast<std::int64_t>(tokens.size()));
    const at::Tensor context =
        at::tensor(
            at::ArrayRef<std::int64_t>(tokens).slice(tokens.size() - length),
            at::kLong)
            .unsqueeze(0)
            .to(device);
    const at::Tensor out = logits(context);
    tokens.push_back(
        draw(out.select(0, 0).select(0, length - 1), generator, options));
    if (std::ranges::count(options.stop_tokens, tokens.back()) > 0) {
      break;
    }
  }
  return {
      tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()),
      tokens.end()};
}

}  // namespace flatshard::models
