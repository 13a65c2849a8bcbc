#include "flatshard/nn/loss.h"

#include <gtest/gtest.h>

#include <vector>

#include "check.h"
#include "flatshard/core/error.h"
#include "tests/support/sum_order.h"

namespace flatshard::nn {
namespace {

struct Case {
  at::ScalarType dtype;
  std::int64_t chunk;
  LossReduction reduction;
  double soft_cap = 0.0;
};

class Loss : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    Loss,
    ::testing::Values(
        Case{at::kFloat, 0, LossReduction::mean},
        Case{at::kFloat, 3, LossReduction::mean},
        Case{at::kFloat, 4, LossReduction::sum},
        Case{at::kFloat, 1000, LossReduction::sum},
        Case{at::kFloat, 0, LossReduction::mean, 2.0},
        Case{at::kFloat, 3, LossReduction::sum, 2.0},
        Case{at::kBFloat16, 0, LossReduction::mean},
        Case{at::kBFloat16, 5, LossReduction::sum}),
    [](const auto& info) {
      return std::string(c10::toString(info.param.dtype)) +
             std::to_string(info.param.chunk) +
             (info.param.reduction == LossReduction::mean ? "mean" : "sum") +
             (info.param.soft_cap > 0 ? "capped" : "");
    });

// Logits are rounded once to the compute dtype at a size of up to 8 (dim 16,
// unit variance). So probabilities are off by 8 half-ulps, with three roundings
// more on the way. Chunks add into a gradient of that dtype: one each.
// In float32: logits, two sums of the softmax, and the gradients' matmuls.
double loss_tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16
             ? 16 * epsilon(dtype)
             : testing::sum_tolerance({.addends = 29, .in_a_row = 4});
}

TEST_P(Loss, MatchesPlainCrossEntropy) {
  const Case& c = GetParam();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor h =
      at::randn({2, 7, 16}, generator).to(c.dtype).requires_grad_();
  const at::Tensor w =
      at::randn({29, 16}, generator).to(c.dtype).requires_grad_();
  at::Tensor targets = at::randint(29, {2, 7}, generator, at::kLong);
  targets[0][3] = -100;
  targets[1][6] = -100;
  const at::Tensor he = h.detach().to(at::kDouble).requires_grad_();
  const at::Tensor we = w.detach().to(at::kDouble).requires_grad_();
  const LossOptions options{
      .reduction = c.reduction,
      .chunk_tokens = c.chunk,
      .soft_cap = c.soft_cap};
  const at::Tensor upstream = at::scalar_tensor(0.75F);
  const at::Tensor loss = linear_cross_entropy(h, w, targets, options);
  loss.backward(upstream);
  const at::Tensor want = at::cross_entropy_loss(
      soft_capped(at::linear(he, we), c.soft_cap).view({14, 29}),
      targets.view({14}),
      {},
      c.reduction == LossReduction::mean ? at::Reduction::Mean
                                         : at::Reduction::Sum);
  want.backward(upstream.to(at::kDouble));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  const double tol = loss_tolerance(c.dtype);
  EXPECT_LE(relative_error(loss, want), tol);
  EXPECT_LE(relative_error(h.grad(), he.grad()), tol);
  EXPECT_LE(relative_error(w.grad(), we.grad()), tol);

  for (const at::ScalarType dtype : {c.dtype, at::kFloat}) {
    w.mutable_grad() = at::Tensor();
    const auto sink = std::make_shared<FakeSink>(dtype);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    for (int round = 1; round <= 2; ++round) {
      linear_cross_entropy(h, w, targets, options, context).backward(upstream);
      EXPECT_FALSE(w.grad().defined());
      EXPECT_LE(relative_error(sink->grad(w), we.grad() * round), tol);
    }
    EXPECT_TRUE(sink->balanced());
  }
  {
    const at::NoGradGuard no_grad;
    const at::Tensor eval = linear_cross_entropy(h, w, targets, options);
    EXPECT_LE(relative_error(eval, want), tol);
    EXPECT_FALSE(eval.requires_grad());
  }
}

// A sum of 1024 equal gradients in bfloat16 would stay at 256 of them.
TEST(LossChunks, GradientsOfTheWeightAreSummedInFloat32) {
  const at::Tensor h = at::ones({1024, 4}, at::kBFloat16);
  const at::Tensor targets = at::zeros({1024}, at::kLong);
  std::vector<at::Tensor> grads;
  for (const std::int64_t chunk : {0, 1}) {
    const at::Tensor w = at::zeros({8, 4}, at::kBFloat16).requires_grad_();
    linear_cross_entropy(
        h,
        w,
        targets,
        {.reduction = LossReduction::sum, .chunk_tokens = chunk})
        .backward();
    grads.push_back(w.grad());
  }
  // (1/8 - 1) * 1024 and 1024 / 8
  EXPECT_EQ(grads[0][0][0].item<float>(), -896);
  EXPECT_EQ(grads[0][1][0].item<float>(), 128);
  EXPECT_TRUE(at::equal(grads[0], grads[1]));
}

TEST(LossErrors, BadTargetsAreNamed) {
  try {
    linear_cross_entropy(
        at::ones({2, 4}),
        at::ones({5, 4}),
        at::tensor({1, 5}, at::kLong));
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(e.message(), "expected targets in [0, 5) or -100, got 5");
  }
  EXPECT_THROW(
      linear_cross_entropy(
          at::ones({2, 4}),
          at::ones({5, 4}),
          at::tensor({1, 2, 3}, at::kLong)),
      Error);
}

TEST(LossErrors, NoTokensGiveZero) {
  const at::Tensor h = at::ones({2, 4}).requires_grad_();
  const at::Tensor loss = linear_cross_entropy(
      h,
      at::ones({5, 4}),
      at::tensor({-100, -100}, at::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<float>(), 0.0F);
  EXPECT_EQ(h.grad().abs().sum().item<float>(), 0.0F);
}

}  // namespace
}  // namespace flatshard::nn
