// Layers with FP8 weights from a WeightSource, against matmuls of the operands
// that they quantize.
#include "flatshard/core/error.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/nn/weight_source.h"
#include "tests/support/message_of.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <memory>

namespace flatshard {
namespace {

using float8::Recipe;
using ::testing::HasSubstr;
using testing::message_of;

constexpr std::int64_t kIn = 128;
constexpr std::int64_t kOut = 256;
constexpr std::int64_t kTokens = 37;

// Planes of tensors with their own values.
class PlanesOfTensors : public nn::WeightSource {
 public:
  explicit PlanesOfTensors(Recipe recipe) : recipe_(recipe) {}
  std::optional<Recipe> recipe(const at::Tensor& p) const override {
    return p.dim() == 2 ? std::optional(recipe_) : std::nullopt;
  }
  std::optional<nn::EncodedWeight> plane(const at::Tensor& p, nn::PlaneUse use)
      override {
    if (!recipe(p)) {
      return std::nullopt;
    }
    ++(use == nn::PlaneUse::fprop ? num_rows : num_columns);
    return nn::EncodedWeight{
        {float8::quantize(
             p.detach(),
             {.recipe = recipe_},
             {.axis = use == nn::PlaneUse::fprop ? float8::Axis::row
                                                 : float8::Axis::column}),
         recipe_}};
  }

  int num_rows = 0;
  int num_columns = 0;

 private:
  Recipe recipe_;
};

class Float8Linears : public ::testing::TestWithParam<Recipe> {
 protected:
  Float8Linears() : source_(std::make_shared<PlanesOfTensors>(GetParam())) {
    at::manual_seed(1);
  }

  nn::Linear make(bool bias = false) {
    nn::Linear layer(kIn, kOut, nn::LinearOptions{.bias = bias});
    nn::materialize(*layer, at::kCPU, at::kBFloat16, nn::random_fill());
    return layer;
  }
  at::Tensor input(std::int64_t width) {
    return at::randn({kTokens, width}, at::kBFloat16).set_requires_grad(true);
  }
  // Relative error in the 2-norm.
  static double error(const at::Tensor& got, const at::Tensor& want) {
    return ((got.to(at::kFloat) - want.to(at::kFloat)).norm() /
            want.to(at::kFloat).norm())
        .item<double>();
  }

  std::shared_ptr<PlanesOfTensors> source_;
};

// Two operands with 3 bits of mantissa: 2^-4 / sqrt(3) each, rounded to
// nearest; gradients of tensorwise have 2 bits.
constexpr double kMostError = 0.06;
// The difference from the same matmuls without FP8.
constexpr double kLeastError = 0.01;

TEST_P(Float8Linears, ProductsAreThoseOfFp8Operands) {
  const auto run = [&](bool fp8) {
    at::manual_seed(2);
    nn::Linear layer = make(/*bias=*/true);
    const at::Tensor x = input(kIn);
    const at::Tensor residual = input(kOut);
    if (fp8) {
      layer->set_weight_source(source_);
    }
    const at::Tensor y = layer(x, residual);
    torch::autograd::backward({y}, {at::randn_like(y)});
    return std::vector<at::Tensor>{
        y.detach() - residual.detach(),
        x.grad(),
        layer->weight().grad(),
        layer->bias().grad(),
        residual.grad()};
  };
  const auto fp8 = run(true);
  const auto bf16 = run(false);
  for (const int product : {0, 1, 2}) {
    const double apart = error(fp8[product], bf16[product]);
    EXPECT_LT(apart, kMostError) << product;
    EXPECT_GT(apart, kLeastError) << product;
  }
  EXPECT_TRUE(fp8[3].equal(bf16[3]));
  EXPECT_TRUE(fp8[4].equal(bf16[4]));
  EXPECT_EQ(source_->num_rows, 1);
  EXPECT_EQ(source_->num_columns, 1);
}

TEST_P(Float8Linears, LayersThatReadOneInputAgreeWithEachByItself) {
  const auto run = [&](bool together) {
    at::manual_seed(3);
    nn::Linear a = make();
    nn::Linear b = make();
    a->set_weight_source(source_);
    b->set_weight_source(source_);
    const at::Tensor x = input(kIn);
    std::vector<at::Tensor> out;
    if (together) {
      out = nn::linears(x, {a.get(), b.get()});
    } else {
      out = {a(x), b(x)};
    }
    torch::autograd::backward(
        {out[0], out[1]},
        {at::ones_like(out[0]), at::ones_like(out[1])});
    return std::vector<at::Tensor>{
        out[0].detach(),
        out[1].detach(),
        a->weight().grad(),
        b->weight().grad(),
        x.grad()};
  };
  const auto together = run(true);
  const auto apart = run(false);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(together[i].equal(apart[i])) << i;
  }
  // Two gradients that are accumulated inside a matmul are rounded once.
  EXPECT_LT(error(together[4], apart[4]), 5e-3);
}

TEST_P(Float8Linears, FusedLayersAgreeWithTheirParts) {
  const auto run = [&](bool fused) {
    at::manual_seed(4);
    nn::RmsNorm norm(kIn, 1e-5);
    nn::materialize(*norm, at::kCPU, at::kBFloat16, nn::random_fill());
    nn::Linear gate = make();
    nn::Linear up = make();
    nn::Linear down(kOut, kIn, nn::LinearOptions{});
    nn::materialize(*down, at::kCPU, at::kBFloat16, nn::random_fill());
    for (nn::Linear* layer : {&gate, &up, &down}) {
      (*layer)->set_weight_source(source_);
    }
    const at::Tensor x = input(kIn);
    at::Tensor y;
    if (fused) {
      const auto [sum, outs] =
          nn::norm_linears(x, {}, *norm, {gate.get(), up.get()});
      y = nn::swiglu_linear(outs[0], outs[1], *down, sum);
    } else {
      const at::Tensor normed = norm(x);
      y = down(nn::swiglu(gate(normed), up(normed)), x);
    }
    torch::autograd::backward({y}, {at::ones_like(y)});
    return std::vector<at::Tensor>{
        y.detach(),
        x.grad(),
        gate->weight().grad(),
        up->weight().grad(),
        down->weight().grad(),
        norm->weight().grad()};
  };
  const auto fused = run(true);
  const auto parts = run(false);
  for (std::size_t i = 0; i < fused.size(); ++i) {
    EXPECT_LT(error(fused[i], parts[i]), 2e-2) << i;
  }
}

TEST_P(Float8Linears, HaveNoSecondDerivative) {
  nn::Linear layer = make();
  layer->set_weight_source(source_);
  const at::Tensor x = input(kIn);
  const at::Tensor loss = layer(x).sum();
  EXPECT_THAT(
      message_of([&] {
        torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
      }),
      HasSubstr("a layer with FP8 weights has no second derivative"));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes,
    Float8Linears,
    ::testing::Values(
        Recipe::tensorwise,
        Recipe::rowwise,
        Recipe::blockwise,
        Recipe::mxfp8),
    [](const auto& info) {
      return std::string(float8::to_string(info.param));
    });

}  // namespace
}  // namespace flatshard
