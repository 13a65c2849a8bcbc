#include "flatshard/nn/recompute.h"

#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "flatshard/core/error.h"
#include "flatshard/nn/dropout.h"
#include "flatshard/nn/linear.h"

namespace flatshard::nn {
namespace {

class NetImpl : public Module {
 public:
  explicit NetImpl(std::optional<at::Generator> generator) : Module("Net") {
    up_ = register_module("up", Linear(6, 10));
    drop_ = register_module("drop", Dropout(0.5, generator));
    down_ = register_module("down", Linear(10, 6));
  }
  at::Tensor run(const at::Tensor& x) {
    ++runs;
    return down_(drop_(at::tanh(up_(x))), x);
  }
  at::Tensor forward(const at::Tensor& x, bool recompute) {
    if (!recompute) {
      return run(x);
    }
    return checkpoint(
        *this,
        [this](const at::Tensor& in) { return run(in); },
        x);
  }
  int runs = 0;

 private:
  Linear up_{nullptr}, down_{nullptr};
  Dropout drop_{nullptr};
};
FLATSHARD_MODULE(Net);

struct Result {
  at::Tensor loss, dx;
  TensorList grads;
};

Result step(bool recompute, bool explicit_generator, bool input_grad = true) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  at::manual_seed(9);
  Net net(explicit_generator ? std::optional(generator) : std::nullopt);
  materialize(
      *net,
      at::kCPU,
      at::kFloat,
      random_fill(at::make_generator<at::CPUGeneratorImpl>(1)));
  const at::Tensor x =
      at::randn({4, 6}, at::make_generator<at::CPUGeneratorImpl>(2));
  x.set_requires_grad(input_grad);
  // Twice, so that the draws before and after the recompute must line up.
  const at::Tensor y = net(net(x, recompute), recompute);
  const at::Tensor after = at::rand({3});
  const at::Tensor loss = (y * y).sum() + after.sum();
  loss.backward();
  EXPECT_EQ(net->runs, recompute ? 4 : 2);
  Result result{.loss = loss, .dx = x.grad()};
  for (const at::Tensor& p : net->parameters()) {
    result.grads.push_back(p.grad());
  }
  result.grads.push_back(at::rand({3}));  // the stream continues as without
  return result;
}

TEST(Recompute, EqualsNoRecomputeBitwiseWithDropout) {
  for (const bool explicit_generator : {false, true}) {
    const Result a = step(false, explicit_generator);
    const Result b = step(true, explicit_generator);
    EXPECT_TRUE(at::equal(a.loss, b.loss));
    EXPECT_TRUE(at::equal(a.dx, b.dx));
    ASSERT_EQ(a.grads.size(), b.grads.size());
    for (std::size_t i = 0; i < a.grads.size(); ++i) {
      EXPECT_TRUE(at::equal(a.grads[i], b.grads[i])) << i;
    }
  }
}

TEST(Recompute, InputsWithoutGradientStillTrainTheParameters) {
  const Result a = step(false, true, false);
  const Result b = step(true, true, false);
  for (std::size_t i = 0; i < a.grads.size(); ++i) {
    ASSERT_TRUE(b.grads[i].defined());
    EXPECT_TRUE(at::equal(a.grads[i], b.grads[i])) << i;
  }
}

class Listener : public RecomputeListener {
 public:
  void recompute_begin(Module& owner) override { log += "<" + owner.name(); }
  std::string log;
};

TEST(Recompute, TellsItsListener) {
  Net net(std::nullopt);
  materialize(*net, at::kCPU, at::kFloat, random_fill());
  const auto listener = std::make_shared<Listener>();
  net->set_recompute_listener(listener);
  const at::Tensor x = at::ones({2, 6}).requires_grad_();
  const at::Tensor y = net(x, true);
  EXPECT_EQ(listener->log, "");
  y.sum().backward();
  EXPECT_EQ(listener->log, "<Net");
  int calls = 0;
  const at::Tensor z = checkpoint(
      *net,
      [&calls](const at::Tensor& in) {
        FLATSHARD_CHECK(++calls == 1, usage, "second run fails");
        return in * 2;
      },
      x);
  EXPECT_THROW(z.sum().backward(), Error);
  EXPECT_EQ(listener->log, "<Net<Net");
}

TEST(Recompute, RefusesWhatANestedBackwardCannotDo) {
  Net net(std::nullopt);
  materialize(*net, at::kCPU, at::kFloat, random_fill());
  const at::Tensor x = at::ones({2, 6}).requires_grad_();
  EXPECT_THROW(torch::autograd::grad({net(x, true).sum()}, {x}), Error);
  EXPECT_THROW(
      torch::autograd::backward({net(x, true).sum()}, {}, true, true),
      Error);
}

TEST(Recompute, RefusesToWriteIntoItsInputs) {
  const auto module = std::make_shared<Module>("owner");
  const at::Tensor x = at::ones({3});
  EXPECT_THROW(
      checkpoint(
          *module,
          [](const at::Tensor& in) { return in.mul_(2) + 1; },
          x),
      Error);
}

TEST(Recompute, SeveralInputsAndOutputs) {
  Net net(std::nullopt);
  materialize(*net, at::kCPU, at::kFloat, random_fill());
  const at::Tensor a = at::ones({3}).requires_grad_();
  const at::Tensor b = at::full({3}, 2.0F);
  const auto fn = [](const TensorList& in) {
    return TensorList{in[0] * in[1], in[1], in[0].exp()};
  };
  const TensorList out = checkpoint(*net, RecomputeFn(fn), TensorList{a, b});
  ASSERT_EQ(out.size(), 3U);
  out[0].sum().backward();  // out[2] unused
  EXPECT_TRUE(at::equal(a.grad(), b));
}

}  // namespace
}  // namespace flatshard::nn
