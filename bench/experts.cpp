// Measures the parts of a layer of experts on a GPU, at the sizes of
// Qwen3-30B-A3B with 8192 tokens: a line of JSON for each. Random data.
// usage: flatshard_experts [tokens]
#include "bench/gpu_calls.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/router.h"

namespace flatshard {
namespace {

constexpr std::int64_t kExperts = 128;
constexpr std::int64_t kPerToken = 8;
constexpr std::int64_t kDim = 2048;
constexpr std::int64_t kWidth = 768;

// Reports a part with its rates. Zero bytes or products have none.
template <class Call>
void measure(const char* part, double nbytes, double flop, Call&& call) {
  const double us =
      call_microseconds(1, [&](std::int64_t) { static_cast<void>(call()); });
  JsonLine line;
  line.text("part", part).number("us", us, 1);
  if (nbytes > 0) {
    line.number("gb_per_s", 1e-3 * nbytes / us);
  }
  if (flop > 0) {
    line.number("tflops", 1e-6 * flop / us);
  }
}

void measure_routing(const at::Tensor& logits) {
  const nn::RouterOptions options{
      .experts_per_token = kPerToken,
      .aux_loss = 0.001};
  const double nbytes = static_cast<double>(logits.nbytes());
  measure("route", nbytes, 0, [&] { return nn::route(logits, {}, options); });
  const at::Tensor leaf = logits.detach().requires_grad_();
  const at::AutoGradMode grad_mode(true);
  const nn::Routing routing = nn::route(leaf, {}, options);
  const at::Tensor g = at::rand(routing.weights.sizes(), kFloat);
  measure("route and its backward", 3 * nbytes, 0, [&] {
    leaf.mutable_grad() = at::Tensor();
    nn::route(leaf, {}, options).weights.backward(g);
  });
}

void measure_rows(
    const at::Tensor& x,
    const nn::Routing& routing,
    const nn::Permutation& order) {
  measure("sort by expert", 0, 0, [&] {
    return nn::sort_by_expert(routing.experts, routing.counts).order;
  });
  const double one = static_cast<double>(x.nbytes());
  measure("permute rows", one * (1 + kPerToken), 0, [&] {
    return nn::permute_rows(x, order);
  });
  const at::Tensor rows = nn::permute_rows(x, order);
  measure("sum rows of tokens", one * (kPerToken + 2), 0, [&] {
    return nn::sum_rows_of_tokens(rows, order, x);
  });
}

void measure_products(const at::Tensor& x, const nn::Groups& groups) {
  const std::int64_t rows = x.size(0);
  const double one = 2.0 * static_cast<double>(rows) * kDim * kWidth;
  const at::Tensor up = at::randn({kExperts, 2 * kWidth, kDim}, kBf16);
  const at::Tensor down = at::randn({kExperts, kDim, kWidth}, kBf16);
  const at::Tensor gate_up = at::randn({rows, 2 * kWidth}, kBf16);
  const at::Tensor act = at::randn({rows, kWidth}, kBf16);
  const at::Tensor factors = at::rand({rows}, kFloat);
  at::Tensor dup = at::empty_like(up);
  at::Tensor ddown = at::empty_like(down);
  measure("y gate+up", 0, 2 * one, [&] {
    return nn::grouped_forward(x, up, groups);
  });
  measure("y down", 0, one, [&] {
    return nn::grouped_forward(act, down, groups);
  });
  measure("dx gate+up", 0, 2 * one, [&] {
    return nn::grouped_input_gradient(gate_up, up, groups);
  });
  measure("dx down", 0, one, [&] {
    return nn::grouped_input_gradient(x, down, groups);
  });
  measure("dw gate+up, in place", 0, 2 * one, [&] {
    nn::grouped_weight_gradient(dup, false, gate_up, x, groups);
    return dup;
  });
  measure("dw down, in place", 0, one, [&] {
    nn::grouped_weight_gradient(ddown, false, x, act, groups);
    return ddown;
  });
  measure("forward and backward, dw in place", 0, 9 * one, [&] {
    nn::grouped_forward(x, up, groups);
    nn::grouped_forward(act, down, groups);
    nn::grouped_input_gradient(x, down, groups);
    nn::grouped_weight_gradient(ddown, false, x, act, groups);
    nn::grouped_input_gradient(gate_up, up, groups);
    nn::grouped_weight_gradient(dup, false, gate_up, x, groups);
    return dup;
  });
  measure("SwiGLU and y down", 0, one, [&] {
    return nn::grouped_swiglu_linear(gate_up, factors, down, groups);
  });
}

void run(std::int64_t tokens) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({tokens, kDim}, kBf16);
  const at::Tensor logits = at::randn({tokens, kExperts}, kFloat);
  measure_routing(logits);
  const nn::Routing routing =
      nn::route(logits, {}, {.experts_per_token = kPerToken});
  const nn::Permutation order =
      nn::sort_by_expert(routing.experts, routing.counts);
  measure_rows(x, routing, order);
  measure_products(
      nn::permute_rows(x, order),
      {routing.counts.cumsum(0, at::kInt)});
}

}  // namespace
}  // namespace flatshard

int main(int, char** argv) {
  return flatshard::run_on_gpu("flatshard_experts", argv[1], flatshard::run);
}
