// Layers with an adapter, in each node that calls layers, against
// x W^T + scale * (x * mask) A^T B^T in plain operations.
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "check.h"
#include "flatshard/core/error.h"
#include "tests/support/sum_order.h"

namespace flatshard::nn {
namespace {

// Sums of at most 12 float32 products: a norm, two layers, the two factors of
// an adapter, forward and backward.
const double kTolerance =
    testing::sum_tolerance({.addends = 12, .in_a_row = 2 * 5});
constexpr double kScale = 0.75;
constexpr std::int64_t kBatch = 2;

using Where = std::tuple<at::DeviceType, double>;

class AdapterTest : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (device() == at::kCUDA && !at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    if (const double p = std::get<1>(GetParam()); p > 0) {
      dropout_ = std::make_shared<SampleDropout>(
          p,
          /*seed=*/5,
          at::tensor({3, 8}, at::kLong).to(device()));
    }
  }
  at::DeviceType device() const { return std::get<0>(GetParam()); }
  at::Tensor random(at::IntArrayRef shape) {
    return at::randn(shape, generator_).to(device());
  }
  at::Tensor leaf(at::IntArrayRef shape) {
    return random(shape).requires_grad_();
  }
  Linear layer(std::int64_t in, std::int64_t out, bool bias = false) {
    Linear made(in, out, LinearOptions{.bias = bias});
    give_memory(made);
    return made;
  }
  void give_memory(Linear& layer) {
    materialize(
        *layer,
        device(),
        at::kFloat,
        [&](const std::string&, const InitSpec&, at::Tensor& t) {
          t.copy_(random(t.sizes()));
        });
  }
  Linear adapted(
      std::int64_t in,
      std::int64_t out,
      bool bias = false,
      const Linear* shared = nullptr) {
    Linear made(in, out, LinearOptions{.bias = bias});
    made->add_adapter(
        {.rank = 3,
         .scale = kScale,
         .dropout = dropout_,
         .dropout_key = static_cast<std::uint64_t>(in + out)},
        shared == nullptr ? nullptr : shared->get());
    give_memory(made);
    // Frozen, as LoRA has it.
    made->weight().set_requires_grad(false);
    return made;
  }
  /// Returns the layer in plain operations.
  at::Tensor plain(const at::Tensor& x, const Linear& layer) {
    at::Tensor y = at::linear(x, layer->weight(), layer->bias());
    const Adapter* adapter = layer->adapter();
    if (adapter == nullptr) {
      return y;
    }
    at::Tensor in = x;
    if (dropout_) {
      const at::Tensor ones =
          at::ones({x.numel() / x.size(-1), x.size(-1)}, x.options());
      in = x * dropout_->apply(ones, adapter->dropout_key).view(x.sizes());
    }
    return y + kScale * at::linear(
                            at::linear(in, adapter->a->weight()),
                            adapter->b->weight());
  }
  /// The same gradients of `of` for both results, and the same results.
  void compare(
      const std::vector<at::Tensor>& got,
      const std::vector<at::Tensor>& want,
      const std::vector<at::Tensor>& of) {
    std::vector<at::Tensor> grads;
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(relative_error(got[i], want[i]), kTolerance) << "result " << i;
      grads.push_back(random(got[i].sizes()));
    }
    const auto ours = torch::autograd::grad(got, of, grads);
    const auto theirs = torch::autograd::grad(want, of, grads);
    for (std::size_t i = 0; i < of.size(); ++i) {
      EXPECT_LT(relative_error(ours[i], theirs[i]), kTolerance)
          << "gradient " << i;
    }
  }
  static void append_factors(std::vector<at::Tensor>& of, const Linear& layer) {
    of.push_back(layer->adapter()->a->weight());
    of.push_back(layer->adapter()->b->weight());
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(7);
  std::shared_ptr<SampleDropout> dropout_;
};

TEST_P(AdapterTest, OfALayer) {
  for (const bool bias : {false, true}) {
    Linear layer = adapted(7, 6, bias);
    const at::Tensor x = leaf({kBatch, 5, 7}), residual = leaf({kBatch, 5, 6});
    std::vector<at::Tensor> of{x, residual};
    append_factors(of, layer);
    if (bias) {
      of.push_back(layer->bias());
    }
    compare({layer(x, residual)}, {plain(x, layer) + residual}, of);
    of.erase(of.begin() + 1);
    compare({layer(x)}, {plain(x, layer)}, of);
  }
}

TEST_P(AdapterTest, OfAnInputThatNeedsNoGradient) {
  Linear layer = adapted(7, 6);
  const at::Tensor x = random({kBatch, 5, 7});
  std::vector<at::Tensor> of;
  append_factors(of, layer);
  compare({layer(x)}, {plain(x, layer)}, of);
}

// The second has none, the third shares the A of the first.
TEST_P(AdapterTest, OfSomeOfTheLayersThatReadOneInput) {
  Linear a = adapted(7, 6), b = layer(7, 3), c = adapted(7, 6, false, &a);
  ASSERT_EQ(
      a->adapter()->a->weight().unsafeGetTensorImpl(),
      c->adapter()->a->weight().unsafeGetTensorImpl());
  const at::Tensor x = leaf({kBatch, 5, 7});
  const std::vector<at::Tensor> of{
      x,
      b->weight(),
      a->adapter()->a->weight(),
      a->adapter()->b->weight(),
      c->adapter()->b->weight()};
  compare(
      linears(x, {a.get(), b.get(), c.get()}),
      {plain(x, a), plain(x, b), plain(x, c)},
      of);
}

TEST_P(AdapterTest, OfLayersOfWhichOneHasNoGradient) {
  Linear a = adapted(7, 6), b = adapted(7, 3);
  const at::Tensor x = leaf({kBatch, 5, 7});
  std::vector<at::Tensor> of{x};
  append_factors(of, b);
  compare({linears(x, {a.get(), b.get()})[1]}, {plain(x, b)}, of);
  // And none for its own factors, not even zeros.
  const auto outs = linears(x, {a.get(), b.get()});
  std::vector<at::Tensor> none;
  append_factors(none, a);
  for (const at::Tensor& gradient : torch::autograd::grad(
           {outs[1].sum()},
           none,
           {},
           /*retain_graph=*/false,
           /*create_graph=*/false,
           /*allow_unused=*/true)) {
    EXPECT_FALSE(gradient.defined());
  }
}

TEST_P(AdapterTest, OfFrozenAsThatReadOneInput) {
  Linear a = adapted(7, 6), b = adapted(7, 3);
  const at::Tensor factor = a->adapter()->a->weight();
  factor.set_requires_grad(false);
  const at::Tensor x = leaf({kBatch, 5, 7});
  const auto outs = linears(x, {a.get(), b.get()});
  compare(
      outs,
      {plain(x, a), plain(x, b)},
      {x,
       a->adapter()->b->weight(),
       b->adapter()->a->weight(),
       b->adapter()->b->weight()});
}

TEST_P(AdapterTest, BehindANorm) {
  RmsNorm norm(7);
  materialize(
      *norm,
      device(),
      at::kFloat,
      [&](const std::string&, const InitSpec&, at::Tensor& t) {
        t.copy_(random(t.sizes()));
      });
  for (const bool frozen : {false, true}) {
    norm->weight().set_requires_grad(!frozen);
    Linear a = adapted(7, 6), b = adapted(7, 3);
    const at::Tensor x = leaf({kBatch, 5, 7}), delta = leaf({kBatch, 5, 7});
    std::vector<at::Tensor> of{x, delta};
    append_factors(of, a);
    append_factors(of, b);
    if (!frozen) {
      of.push_back(norm->weight());
    }
    const NormLinears got = norm_linears(x, delta, *norm, {a.get(), b.get()});
    const auto [sum, normed] = norm(x, delta);
    compare(
        {got.sum, got.outs[0], got.outs[1]},
        {sum, plain(normed, a), plain(normed, b)},
        of);
    // One node for all.
    EXPECT_EQ(got.outs[0].grad_fn(), got.sum.grad_fn());
  }
}

// This occurs in the first block of a model whose embedding is frozen.
TEST_P(AdapterTest, BehindAFrozenNormOfAnInputThatNeedsNoGradient) {
  RmsNorm norm(7);
  materialize(*norm, device(), at::kFloat, random_fill());
  norm->weight().set_requires_grad(false);
  Linear a = adapted(7, 6);
  const at::Tensor x = random({kBatch, 5, 7});
  std::vector<at::Tensor> of;
  append_factors(of, a);
  const NormLinears got = norm_linears(x, {}, *norm, {a.get()});
  compare({got.outs[0]}, {plain(norm(x), a)}, of);
}

TEST_P(AdapterTest, BehindAGate) {
  for (const auto activation :
       {GateActivation::silu, GateActivation::gelu_tanh}) {
    Linear down = adapted(7, 6);
    const at::Tensor gate = leaf({kBatch, 5, 7}), up = leaf({kBatch, 5, 7});
    const at::Tensor residual = leaf({kBatch, 5, 6});
    std::vector<at::Tensor> of{gate, up, residual};
    append_factors(of, down);
    const auto want = [&] { return plain(gated(activation, gate, up), down); };
    compare(
        {gated_linear(activation, gate, up, *down, residual)},
        {want() + residual},
        of);
    of.erase(of.begin() + 2);
    compare({gated_linear(activation, gate, up, *down, {})}, {want()}, of);
  }
}

TEST_P(AdapterTest, GivesItsGradientsToASink) {
  Linear a = adapted(7, 6), b = adapted(7, 6, false, &a);
  const at::Tensor x = leaf({kBatch, 5, 7});
  auto sink = std::make_shared<FakeSink>(at::kFloat);
  for (Linear& layer : std::vector<Linear>{a, b}) {
    for (const auto& factor : layer->children()) {
      dynamic_cast<Module&>(*factor).set_wgrad_sink(sink);
    }
  }
  const auto outs = linears(x, {a.get(), b.get()});
  (outs[0].sum() + 2 * outs[1].sum()).backward();
  EXPECT_TRUE(sink->balanced());
  const at::Tensor factor = a->adapter()->a->weight();
  const auto want = torch::autograd::grad(
      {plain(x, a).sum() + 2 * plain(x, b).sum()},
      {factor, b->adapter()->b->weight()});
  // Both layers' parts of the A that they share.
  EXPECT_LT(relative_error(sink->grad(factor), want[0]), kTolerance);
  EXPECT_LT(
      relative_error(sink->grad(b->adapter()->b->weight()), want[1]),
      kTolerance);
}

TEST_P(AdapterTest, HasNoSecondDerivative) {
  Linear layer = adapted(7, 6);
  const at::Tensor x = leaf({kBatch, 5, 7});
  EXPECT_THROW(
      torch::autograd::grad(
          {layer(x).sum()},
          {x},
          {},
          /*retain_graph=*/true,
          /*create_graph=*/true),
      Error);
}

INSTANTIATE_TEST_SUITE_P(
    Devices,
    AdapterTest,
    ::testing::Combine(
        ::testing::Values(at::kCPU, at::kCUDA),
        ::testing::Values(0.0, 0.4)),
    [](const auto& info) {
      return std::string(
                 std::get<0>(info.param) == at::kCUDA ? "cuda" : "cpu") +
             (std::get<1>(info.param) > 0 ? "Dropout" : "");
    });

class SampleDropoutTest : public ::testing::Test {
 protected:
  at::Tensor
  drop(const at::Tensor& samples, const at::Tensor& x, std::uint64_t key = 1) {
    return SampleDropout(0.25, 5, samples).apply(x, key);
  }
};

TEST_F(SampleDropoutTest, DrawsBySampleAndNotByItsPlaceInABatch) {
  const at::Tensor ones = at::ones({6, 10});
  const at::Tensor batch = drop(at::tensor({4, 9}, at::kLong), ones);
  const at::Tensor other = drop(at::tensor({9, 7}, at::kLong), ones);
  EXPECT_TRUE(batch.narrow(0, 3, 3).equal(other.narrow(0, 0, 3)));
  EXPECT_FALSE(batch.narrow(0, 0, 3).equal(other.narrow(0, 3, 3)));
  EXPECT_FALSE(drop(at::tensor({4, 9}, at::kLong), ones, 2).equal(batch));
  EXPECT_FALSE(batch[0].equal(batch[1]));
}

// Ranks that share sequences drop what one rank with all rows drops.
TEST_F(SampleDropoutTest, G13_DrawsForARunOfRows) {
  const at::Tensor samples = at::tensor({4, -1, 9}, at::kLong);
  const at::Tensor x = at::randn({12, 10});
  const at::Tensor all = drop(samples, x);
  for (const std::int64_t parts : {2, 3, 4}) {
    for (std::int64_t part = 0; part < parts; ++part) {
      const auto own = [&](const at::Tensor& t) {
        return t.chunk(parts)[static_cast<std::size_t>(part)];
      };
      EXPECT_TRUE(SampleDropout(0.25, 5, samples, {part, parts})
                      .apply(own(x), 1)
                      .equal(own(all)));
    }
  }
}

TEST_F(SampleDropoutTest, KeepsTheMeanAndTheRate) {
  const at::Tensor out = drop(at::tensor({4}, at::kLong), at::ones({400, 250}));
  const double zeros = (out == 0).to(at::kDouble).mean().item<double>();
  // Five standard deviations of 100,000 draws.
  EXPECT_NEAR(zeros, 0.25, 5 * std::sqrt(0.25 * 0.75 / 1e5));
  EXPECT_FLOAT_EQ(out.max().item<float>(), 1.0F / 0.75F);
}

TEST_F(SampleDropoutTest, LeavesSamplesWithoutANumber) {
  const at::Tensor x = at::randn({6, 10});
  EXPECT_TRUE(drop(at::tensor({-1, -1}, at::kLong), x).equal(x));
}

TEST_F(SampleDropoutTest, GivesAGpuTheCpusDraws) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no GPU, or a build without CUDA";
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t n : {10, 12}) {
      const at::Tensor samples = at::tensor({4, -1}, at::kLong);
      const at::Tensor x = at::randn({6, n}).to(dtype);
      const SampleDropout there(0.25, 5, samples.cuda());
      EXPECT_TRUE(there.apply(x.cuda(), 1).cpu().equal(drop(samples, x)));
      at::Tensor sum = at::ones_like(x).cuda(), here = at::ones_like(x);
      there.add(x.cuda(), 1, sum);
      SampleDropout(0.25, 5, samples).add(x, 1, here);
      EXPECT_LE(relative_error(sum.cpu(), here), epsilon(dtype) * 2);
    }
  }
}

}  // namespace
}  // namespace flatshard::nn
