#include "flatshard/nn/norm_linears.h"

#include <gtest/gtest.h>

#include "check.h"
#include "flatshard/core/error.h"
#include "tests/support/sum_order.h"

namespace flatshard::nn {
namespace {

using Where = std::tuple<at::DeviceType, at::ScalarType>;

// The result equals the norm and the layers one by one: all results and
// gradients are bitwise identical, because either way calls the same kernels on
// the same shapes.
class NormLinearsTest : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (device() == at::kCUDA && !at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    set_parameter_data(norm_->weight(), leaf({7}).detach());
    set_parameter_data(a_->weight(), leaf({6, 7}).detach());
    set_parameter_data(b_->weight(), leaf({3, 7}).detach());
  }
  at::DeviceType device() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  at::Tensor random(at::IntArrayRef shape, at::Generator generator) const {
    return at::randn(shape, generator).to(dtype()).to(device());
  }
  at::Tensor leaf(std::vector<std::int64_t> shape) {
    return random(shape, generator_).requires_grad_();
  }
  std::vector<at::Tensor> parameters() {
    return {norm_->weight(), a_->weight(), b_->weight()};
  }
  /// Returns the gradients of x, delta (if defined) and the parameters that
  /// need one, for random gradients of all results.
  std::vector<at::Tensor> gradients(
      const NormLinears& results,
      std::vector<at::Tensor> of) {
    for (const at::Tensor& p : parameters()) {
      if (p.requires_grad()) {
        of.push_back(p);
      }
    }
    const auto [all, grads] = with_random_gradients(results);
    return torch::autograd::grad(all, of, grads);
  }
  /// Returns all results, and a gradient of each: the same in every call.
  std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>
  with_random_gradients(const NormLinears& results) {
    std::vector<at::Tensor> all{results.sum};
    all.insert(all.end(), results.outs.begin(), results.outs.end());
    std::vector<at::Tensor> grads;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    for (const at::Tensor& t : all) {
      grads.push_back(random(t.sizes(), generator));
    }
    return {all, grads};
  }
  NormLinears one_by_one(const at::Tensor& x, const at::Tensor& delta) {
    const auto [sum, normed] = norm_(x, delta);
    return {sum, linears(normed, layers_)};
  }
  NormLinears together(const at::Tensor& x, const at::Tensor& delta) {
    return norm_linears(x, delta, *norm_, layers_);
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(7);
  RmsNorm norm_{7};
  Linear a_{7, 6}, b_{7, 3};
  const std::vector<LinearImpl*> layers_{a_.get(), b_.get()};
};

TEST_P(NormLinearsTest, HasTheBitsOfItsLayersOneByOne) {
  for (const bool adds : {false, true}) {
    const at::Tensor x = leaf({2, 5, 7});
    const at::Tensor delta = adds ? leaf({2, 5, 7}) : at::Tensor();
    const NormLinears want = one_by_one(x, delta);
    const NormLinears got = together(x, delta);
    EXPECT_TRUE(got.sum.equal(want.sum));
    ASSERT_EQ(got.outs.size(), 2U);
    EXPECT_TRUE(got.outs[0].equal(want.outs[0]));
    EXPECT_TRUE(got.outs[1].equal(want.outs[1]));
    // One node for all.
    EXPECT_EQ(got.outs[0].grad_fn(), got.sum.grad_fn());
    std::vector<at::Tensor> inputs{x};
    if (adds) {
      inputs.push_back(delta);
    }
    const auto want_grads = gradients(want, inputs);
    const auto got_grads = gradients(got, inputs);
    for (std::size_t i = 0; i < want_grads.size(); ++i) {
      EXPECT_TRUE(got_grads[i].equal(want_grads[i])) << adds << " " << i;
    }
  }
}

TEST_P(NormLinearsTest, WithBiases) {
  const LinearOptions biased{.bias = true};
  Linear a(7, 6, biased), b(7, 3, biased);
  for (Linear& layer : std::vector<Linear>{a, b}) {
    set_parameter_data(
        layer->weight(),
        leaf(layer->weight().sizes().vec()).detach());
    set_parameter_data(
        layer->bias(),
        leaf(layer->bias().sizes().vec()).detach());
  }
  const at::Tensor x = leaf({2, 5, 7}), delta = leaf({2, 5, 7});
  const std::vector<at::Tensor> of{
      x,
      delta,
      norm_->weight(),
      a->weight(),
      b->weight(),
      a->bias(),
      b->bias()};
  const auto check = [&](const NormLinears& got, const NormLinears& want) {
    EXPECT_TRUE(got.sum.equal(want.sum));
    EXPECT_TRUE(got.outs[0].equal(want.outs[0]));
    EXPECT_TRUE(got.outs[1].equal(want.outs[1]));
    EXPECT_EQ(got.outs[0].grad_fn(), got.outs[1].grad_fn());
    const auto run = [&](const NormLinears& r) {
      const auto [all, grads] = with_random_gradients(r);
      return torch::autograd::grad(all, of, grads);
    };
    const auto want_grads = run(want), got_grads = run(got);
    // The gradients of what both layers read are added in another place, then
    // the norm's backward sums up.
    const double tolerance = testing::sum_tolerance(
        {.addends = 2, .in_a_row = 2, .roundoff = epsilon(dtype())});
    for (std::size_t i = 0; i < of.size(); ++i) {
      EXPECT_LE(relative_error(got_grads[i], want_grads[i]), tolerance) << i;
    }
  };
  const auto one_by_one = [&] {
    const auto [sum, normed] = norm_(x, delta);
    return NormLinears{sum, {a(normed), b(normed)}};
  };
  check(norm_linears(x, delta, *norm_, {a.get(), b.get()}), one_by_one());
  const auto [sum, rows] = norm_(x, delta);
  check({sum, linears(rows, {a.get(), b.get()})}, one_by_one());
  // When one of them has none, they are two nodes.
  const auto mixed = linears(rows, {a.get(), b_.get()});
  EXPECT_NE(mixed[0].grad_fn(), mixed[1].grad_fn());
}

TEST_P(NormLinearsTest, WithPartsFrozen) {
  // Bits: x, delta, norm, a, b need a gradient.
  for (int needs = 1; needs < 32; ++needs) {
    const at::Tensor x = leaf({5, 7}).detach();
    const at::Tensor delta = leaf({5, 7}).detach();
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& t : {x, delta}) {
      if ((needs >> (t.is_same(x) ? 0 : 1) & 1) != 0) {
        at::Tensor(t).requires_grad_();
        inputs.push_back(t);
      }
    }
    for (int i = 0; i < 3; ++i) {
      at::Tensor p = parameters()[static_cast<std::size_t>(i)];
      p.requires_grad_((needs >> (2 + i) & 1) != 0);
    }
    const auto of_results = [&](const NormLinears& r) {
      std::vector<at::Tensor> of = inputs;
      for (const at::Tensor& p : parameters()) {
        if (p.requires_grad()) {
          of.push_back(p);
        }
      }
      at::Tensor total = at::zeros({}, at::dtype(at::kDouble).device(device()));
      double factor = 1;
      for (const at::Tensor& t : {r.sum, r.outs[0], r.outs[1]}) {
        total = total + t.to(at::kDouble).square().sum() * (factor += 1);
      }
      return torch::autograd::grad({total}, of);
    };
    const auto want = of_results(one_by_one(x, delta));
    const auto got = of_results(together(x, delta));
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_TRUE(got[i].equal(want[i])) << needs << " " << i;
    }
  }
}

TEST_P(NormLinearsTest, WithSomeResultsUnused) {
  const at::Tensor x = leaf({5, 7}), delta = leaf({5, 7});
  const auto check = [&](const auto& used) {
    const auto run = [&](const NormLinears& r) {
      return torch::autograd::grad(
          {used(r).sum()},
          {x, delta, norm_->weight(), a_->weight(), b_->weight()},
          {},
          std::nullopt,
          /*create_graph=*/false,
          /*allow_unused=*/true);
    };
    const auto want = run(one_by_one(x, delta));
    const auto got = run(together(x, delta));
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(got[i].defined(), want[i].defined()) << i;
      if (want[i].defined()) {
        EXPECT_TRUE(got[i].equal(want[i])) << i;
      }
    }
  };
  check([](const NormLinears& r) { return r.sum; });
  check([](const NormLinears& r) { return r.outs[1]; });
  check([](const NormLinears& r) { return r.sum.sum() + r.outs[0].sum(); });
}

TEST_P(NormLinearsTest, WritesIntoTheSinksOfAllItsLayers) {
  const at::Tensor x = leaf({5, 7}), delta = leaf({5, 7});
  const auto want = gradients(one_by_one(x, delta), {x});
  const auto sink = std::make_shared<FakeSink>(dtype());
  norm_->set_wgrad_sink(sink);
  a_->set_wgrad_sink(sink);
  b_->set_wgrad_sink(sink);
  const auto [all, grads] = with_random_gradients(together(x, delta));
  torch::autograd::backward(all, grads);
  EXPECT_TRUE(sink->balanced());
  EXPECT_TRUE(x.grad().equal(want[0]));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(parameters()[i].grad().defined());
    EXPECT_TRUE(sink->grad(parameters()[i]).equal(want[1 + i])) << i;
  }
}

TEST_P(NormLinearsTest, LayersWithHooksAreCalledOneByOne) {
  const at::Tensor x = leaf({5, 7});
  const NormLinears want = one_by_one(x, {});
  int calls = 0;
  const auto pre =
      norm_->add_forward_pre_hook([&](Module&, const TensorList&) { ++calls; });
  EXPECT_TRUE(together(x, {}).outs[1].equal(want.outs[1]));
  EXPECT_EQ(calls, 1);
  const auto post = norm_->add_forward_hook(
      [&](Module&, const TensorList&, const TensorList& outputs) {
        EXPECT_EQ(outputs.size(), 2U);  // the sum and what it made of it
        ++calls;
      });
  EXPECT_TRUE(together(x, {}).outs[1].equal(want.outs[1]));
  EXPECT_EQ(calls, 3);
  Linear biased(7, 2, LinearOptions{.bias = true});
  set_parameter_data(biased->weight(), leaf({2, 7}).detach());
  set_parameter_data(biased->bias(), leaf({2}).detach());
  const NormLinears got = norm_linears(x, {}, *norm_, {biased.get()});
  EXPECT_TRUE(got.outs[0].equal(biased(std::get<1>(norm_(x, at::Tensor())))));
}

TEST_P(NormLinearsTest, WhatDoesNotFitIsRefused) {
  EXPECT_THROW(together(leaf({5, 6}), {}), Error);
  EXPECT_THROW(together(leaf({5, 7}), leaf({4, 7})), Error);
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    NormLinearsTest,
    ::testing::Combine(
        ::testing::Values(at::kCPU, at::kCUDA),
        ::testing::Values(at::kFloat, at::kBFloat16)),
    [](const auto& info) {
      return at::DeviceTypeName(std::get<0>(info.param), true) +
             std::string(c10::toString(std::get<1>(info.param)));
    });

}  // namespace
}  // namespace flatshard::nn
