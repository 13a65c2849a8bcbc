#include "flatshard/nn/recompute.h"

#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include "flatshard/core/error.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/dropout.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/token_runs.h"
#include "tests/nn/check.h"
#include "tests/support/counted_operation.h"

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

// -- runs of tokens -----------------------------------------------------------

class RunsImpl : public Module {
 public:
  RunsImpl() : Module("Runs") {
    up_ = register_module("up", Linear(6, 10));
    down_ = register_module("down", Linear(10, 6));
  }
  at::Tensor forward(const TensorList& in, TokenRunsOptions options) {
    const RecomputeFn fn = [this](const TensorList& run) {
      tokens.push_back(run[0].size(1));
      return TensorList{run[0] + down_(at::tanh(up_(run[1])))};
    };
    return options.tokens > 0
               ? in_token_runs(*this, fn, in, options)
               : fn({in[0].view({1, 12, 6}), in[1].view({1, 12, 6})})[0].view(
                     in[0].sizes());
  }
  std::vector<std::int64_t> tokens;

 private:
  Linear up_{nullptr}, down_{nullptr};
};
FLATSHARD_MODULE(Runs);

Runs make_runs() {
  Runs net;
  materialize(
      *net,
      at::kCPU,
      at::kDouble,
      random_fill(at::make_generator<at::CPUGeneratorImpl>(1)));
  return net;
}

// Sums of 12 tokens, in float64.
constexpr double kRunsTolerance = 12 * 0x1p-50;

double largest_error(const at::Tensor& got, const at::Tensor& want) {
  return ((got - want).abs().max() / want.abs().max()).item<double>();
}

TEST(TokenRuns, EqualTheWhole) {
  for (const std::int64_t tokens : {1, 5, 12, 100}) {
    for (const bool second_needs_grad : {false, true}) {
      Runs whole = make_runs();
      Runs parts = make_runs();
      const auto inputs = [&] {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
        return TensorList{
            at::randn({3, 4, 6}, generator, at::kDouble).requires_grad_(),
            at::randn({3, 4, 6}, generator, at::kDouble)
                .set_requires_grad(second_needs_grad)};
      };
      const TensorList a = inputs(), b = inputs();
      const at::Tensor want = whole->forward(a, {});
      const at::Tensor got = parts->forward(b, {.tokens = tokens});
      EXPECT_LE(largest_error(got, want), kRunsTolerance);
      want.square().sum().backward();
      got.square().sum().backward();
      for (std::size_t i = 0; i < (second_needs_grad ? 2U : 1U); ++i) {
        EXPECT_LE(largest_error(b[i].grad(), a[i].grad()), kRunsTolerance);
      }
      for (std::size_t i = 0; i < whole->parameters().size(); ++i) {
        EXPECT_LE(
            largest_error(
                parts->parameters()[i].grad(),
                whole->parameters()[i].grad()),
            kRunsTolerance)
            << i;
      }
      if (tokens == 5) {
        EXPECT_EQ(parts->tokens, (std::vector<std::int64_t>{5, 5, 2, 5, 5, 2}));
      }
    }
  }
}

// A sink of 16 bits gets the sum of all runs, rounded once.
TEST(TokenRuns, AreAddedInFloat32) {
  const auto gradients = [](at::ScalarType dtype, int num_microbatches) {
    Runs net = make_runs();
    const auto sink = std::make_shared<FakeSink>(dtype);
    for (const auto& module : net->modules()) {
      dynamic_cast<Module&>(*module).set_wgrad_sink(sink);
    }
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(2);
    const TensorList in{
        at::randn({3, 4, 6}, generator, at::kDouble).requires_grad_(),
        at::randn({3, 4, 6}, generator, at::kDouble)};
    for (int i = 0; i < num_microbatches; ++i) {
      net->forward(in, {.tokens = 1}).square().sum().backward();
    }
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : net->parameters()) {
      EXPECT_FALSE(p.grad().defined());
      all.push_back(sink->grad(p));
    }
    return all;
  };
  const auto want = gradients(at::kFloat, 1);
  const auto got = gradients(at::kBFloat16, 2);
  ASSERT_GE(want.size(), 2U);
  for (std::size_t i = 0; i < want.size(); ++i) {
    // Rounded once for each of two equal microbatches.
    EXPECT_TRUE(got[i].equal(want[i].to(at::kBFloat16) * 2)) << i;
  }
}

// The second run of a part around it leaves the runs to their backwards, if
// nothing reads their result. A first run inside that second run computes them.
TEST(TokenRuns, RunTwiceInsideARecomputedPart) {
  for (const bool is_result : {true, false}) {
    for (const bool inside_another : {false, true}) {
      Runs whole = make_runs();
      Runs parts = make_runs();
      const at::Tensor a = at::randn(
                               {3, 4, 6},
                               at::make_generator<at::CPUGeneratorImpl>(2),
                               at::kDouble)
                               .requires_grad_();
      const at::Tensor b = a.detach().clone().requires_grad_();
      whole->forward({a, a}, {}).square().sum().backward();
      const auto part = [&](const at::Tensor& in) {
        return parts->forward(
            {in, in},
            {.tokens = 4, .is_result_of_part = is_result});
      };
      const at::Tensor y =
          inside_another ? checkpoint(
                               *parts,
                               [&](const at::Tensor& in) {
                                 return checkpoint(*parts, part, in) * 1.0;
                               },
                               b)
                         : checkpoint(*parts, part, b);
      y.square().sum().backward();
      EXPECT_LE(largest_error(b.grad(), a.grad()), kRunsTolerance);
      const std::size_t passes =
          2 + (is_result ? 0 : 1) + (inside_another ? 1 : 0);
      EXPECT_EQ(parts->tokens.size(), 3 * passes)
          << is_result << inside_another;
    }
  }
}

TEST(TokenRuns, KeepNothingInAnEvaluationAndRefuseNoTokens) {
  Runs parts = make_runs();
  const at::Tensor x = at::ones({3, 4, 6}, at::kDouble);
  {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(
        parts->forward({x, x}, {.tokens = 5}),
        parts->forward({x, x}, {})));
  }
  EXPECT_THROW(in_token_runs(*parts, RecomputeFn(), {x}, {.tokens = 0}), Error);
  // Without an input that needs a gradient the parameters are trained.
  parts->forward({x, x}, {.tokens = 5}).sum().backward();
  for (const at::Tensor& parameter : parts->parameters()) {
    EXPECT_TRUE(parameter.grad().defined());
  }
}

// -- attention that is kept ---------------------------------------------------

constexpr const char* kCpuAttention =
    "aten::_scaled_dot_product_flash_attention_for_cpu";

enum class Mode { none, recompute, keep };

/// Three attentions of different shapes, one after the other: grouped heads, a
/// window that no kernel has, and documents.
TensorList attend(const TensorList& in) {
  const auto split = [](const at::Tensor& x, std::int64_t heads) {
    return x.view({x.size(0), x.size(1), heads, -1});
  };
  const at::Tensor kv = split(in[0], 6).narrow(2, 0, 2);
  const at::Tensor first = causal_attention(split(in[0], 6), kv, kv);
  const at::Tensor q = split(first, 3);
  const at::Tensor second = causal_attention(q, q, q, {.window = 3});
  const std::vector<std::int64_t> lengths{4, 5, 8, 1};
  const at::Tensor last = split(second.tanh(), 4);
  return {
      first * first,
      document_attention(
          last,
          last,
          last,
          Documents::of(lengths, in[0].size(1), at::kCPU))};
}

class KeptAttention : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    KeptAttention,
    ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16));

// The number of fused calls: one, and one per document.
TEST_P(KeptAttention, L1_IsBitwiseTheSameWithoutASecondKernel) {
  constexpr std::int64_t kCalls = 1 + 4;
  const auto owner = std::make_shared<Module>("owner");
  testing::CountedOperation calls(kCpuAttention);
  TensorList expected;
  for (const Mode mode : {Mode::none, Mode::recompute, Mode::keep}) {
    const at::Tensor x =
        at::randn({2, 9, 48}, at::make_generator<at::CPUGeneratorImpl>(2))
            .to(GetParam())
            .requires_grad_();
    const TensorList out = mode == Mode::none
                               ? attend({x})
                               : checkpoint(
                                     *owner,
                                     RecomputeFn(attend),
                                     TensorList{x},
                                     {.keep_attention = mode == Mode::keep});
    EXPECT_EQ(calls.take(), kCalls);
    const at::Tensor loss = (out[0] + out[1]).square().sum();
    // Kept results serve a second backward.
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_EQ(calls.take(), mode == Mode::recompute ? kCalls : 0);
    const at::Tensor once = x.grad().clone();
    loss.backward();
    EXPECT_EQ(calls.take(), mode == Mode::recompute ? kCalls : 0);
    const TensorList got{
        out[0].detach(),
        out[1].detach(),
        once,
        x.grad() - once};
    if (mode == Mode::none) {
      expected = got;
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
    }
  }
}

// A part and a part inside it keep separate results.
TEST(Recompute, L2_KeepsAttentionOfAPartInsideAnother) {
  const auto owner = std::make_shared<Module>("owner");
  testing::CountedOperation calls(kCpuAttention);
  for (const bool outer : {false, true}) {
    for (const bool inner : {false, true}) {
      const at::Tensor x =
          at::randn({1, 9, 2, 8}, at::make_generator<at::CPUGeneratorImpl>(2))
              .requires_grad_();
      const auto part = [](const at::Tensor& in) {
        return causal_attention(in, in, in).view(in.sizes());
      };
      const at::Tensor y = checkpoint(
          *owner,
          [&](const at::Tensor& in) {
            return part(
                checkpoint(*owner, part, part(in), {.keep_attention = inner}));
          },
          x,
          {.keep_attention = outer});
      y.sum().backward();
      // The forward, and the second runs of the outer and of the inner part.
      EXPECT_EQ(calls.take(), 3 + (outer ? 1 : 3) + (inner ? 0 : 1))
          << outer << inner;
      const at::Tensor want = x.detach().clone().requires_grad_();
      part(part(part(want))).sum().backward();
      calls.take();
      EXPECT_TRUE(at::equal(x.grad(), want.grad()));
    }
  }
}

TEST(Recompute, AWriteIntoTheResultOfAttentionIsAnError) {
  const auto owner = std::make_shared<Module>("owner");
  const at::Tensor x = at::ones({1, 4, 2, 8}).requires_grad_();
  const auto part = [](const at::Tensor& in) {
    return causal_attention(in, in, in).mul_(2).view(in.sizes());
  };
  // Autograd's own error.
  EXPECT_THROW(part(x).sum().backward(), c10::Error);
  // The second run would multiply once more.
  EXPECT_THROW(checkpoint(*owner, part, x, {.keep_attention = true}), Error);
}

TEST(Recompute, RefusesASecondRunOfOtherLayers) {
  const auto owner = std::make_shared<Module>("owner");
  int runs = 0;
  const at::Tensor x = at::ones({1, 4, 2, 8}).requires_grad_();
  const at::Tensor y = checkpoint(
      *owner,
      [&runs](const at::Tensor& in) {
        return ++runs == 1 ? in * 2
                           : causal_attention(in, in, in).view(in.sizes());
      },
      x,
      {.keep_attention = true});
  try {
    y.sum().backward();
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_NE(
        error.message().find("the first run kept nothing"),
        std::string::npos)
        << error.message();
  }
}

}  // namespace
}  // namespace flatshard::nn
