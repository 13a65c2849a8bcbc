#include <gtest/gtest.h>

#include "attention_reference.h"
#include "check.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/dropout.h"
#include "flatshard/nn/embedding.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/rms_norm.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/swiglu.h"
#include "tests/support/sum_order.h"

#include <numbers>

namespace flatshard::nn {
namespace {

// A few stages of sums of at most 64 terms in float32. In bfloat16 each of 4
// stages rounds once.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kBFloat16
             ? 4 * epsilon(dtype)
             : testing::sum_tolerance({.addends = 64, .in_a_row = 4});
}

class Layers : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { generator_.set_current_seed(7); }

  // Returns a leaf of the tested dtype.
  at::Tensor leaf(std::vector<std::int64_t> shape) {
    return at::randn(shape, generator_).to(GetParam()).requires_grad_();
  }
  // Returns the same values in float64, for the oracle.
  static at::Tensor exact(const at::Tensor& tensor) {
    return tensor.detach().to(at::kDouble).requires_grad_();
  }
  void expect_close(const at::Tensor& got, const at::Tensor& want) {
    ASSERT_TRUE(got.defined());
    EXPECT_EQ(got.sizes(), want.sizes());
    EXPECT_EQ(got.scalar_type(), GetParam());
    EXPECT_LE(relative_error(got, want), tolerance(GetParam()));
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>();
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    Layers,
    ::testing::Values(at::kFloat, at::kBFloat16),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

// weight's gradient plain, then through a sink twice: beta 0, then beta 1.
template <class Run>
void check_sink(const Run& run, const at::Tensor& weight, double tolerance) {
  for (const at::ScalarType dtype : {weight.scalar_type(), at::kFloat}) {
    weight.mutable_grad() = at::Tensor();
    run(ModuleContextPtr());
    const at::Tensor plain = weight.grad();
    ASSERT_TRUE(plain.defined());
    weight.mutable_grad() = at::Tensor();
    const auto sink = std::make_shared<FakeSink>(dtype);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    run(context);
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_LE(relative_error(sink->grad(weight), plain), tolerance);
    run(context);
    EXPECT_LE(relative_error(sink->grad(weight), plain * 2), tolerance);
    EXPECT_TRUE(sink->balanced());
  }
}

TEST_P(Layers, LinearMatchesPlainAutograd) {
  const at::Tensor x = leaf({2, 5, 7}), w = leaf({6, 7}), b = leaf({6}),
                   r = leaf({2, 5, 6});
  const at::Tensor g = at::randn({2, 5, 6}, generator_).to(GetParam());
  const at::Tensor xe = exact(x), we = exact(w), be = exact(b), re = exact(r);
  const at::Tensor y = nn::linear(x, w, b, r);
  y.backward(g);
  const at::Tensor ye = at::linear(xe, we, be) + re;
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(x.grad(), xe.grad());
  expect_close(w.grad(), we.grad());
  expect_close(b.grad(), be.grad());
  expect_close(r.grad(), re.grad());
}

TEST_P(Layers, LinearWritesIntoTheSink) {
  const at::Tensor x = leaf({4, 7}), w = leaf({6, 7}), b = leaf({6});
  const at::Tensor g = at::randn({4, 6}, generator_).to(GetParam());
  const auto run = [&](const ModuleContextPtr& context) {
    nn::linear(x, w, b, {}, context).backward(g);
  };
  check_sink(run, w, tolerance(GetParam()));
  check_sink(run, b, tolerance(GetParam()));
}

TEST_P(Layers, LinearsMatchTheirLayersOneByOne) {
  Linear a(7, 6), b(7, 3), c(7, 6);
  const std::vector<LinearImpl*> layers{a.get(), b.get(), c.get()};
  const at::Tensor x = leaf({2, 5, 7});
  const at::Tensor xe = exact(x);
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> exact_weights;
  for (LinearImpl* layer : layers) {
    const at::Tensor w = leaf(layer->weight().sizes().vec()).detach();
    set_parameter_data(layer->weight(), w);
    exact_weights.push_back(exact(w));
    grads.push_back(at::randn({2, 5, w.size(0)}, generator_).to(GetParam()));
  }
  std::vector<at::Tensor> outs = linears(x, layers);
  ASSERT_EQ(outs.size(), 3U);
  torch::autograd::backward(outs, grads);
  std::vector<at::Tensor> exact_outs;
  std::vector<at::Tensor> exact_grads;
  for (std::size_t i = 0; i < 3; ++i) {
    exact_outs.push_back(at::linear(xe, exact_weights[i]));
    exact_grads.push_back(grads[i].to(at::kDouble));
    expect_close(outs[i], exact_outs[i]);
  }
  torch::autograd::backward(exact_outs, exact_grads);
  expect_close(x.grad(), xe.grad());
  for (std::size_t i = 0; i < 3; ++i) {
    expect_close(layers[i]->weight().grad(), exact_weights[i].grad());
  }
  // One node for all three, and a gradient of some of the outputs only.
  EXPECT_EQ(outs[0].grad_fn(), outs[2].grad_fn());
  b->weight().mutable_grad() = at::Tensor();
  c->weight().mutable_grad() = at::Tensor();
  outs = linears(x, layers);
  outs[1].backward(grads[1]);
  expect_close(b->weight().grad(), exact_weights[1].grad());
  EXPECT_FALSE(c->weight().grad().defined());
}

TEST(Linears, WriteIntoTheSinksOfTheirLayers) {
  Linear a(4, 2), b(4, 3);
  materialize(*a, at::kCPU, at::kFloat, random_fill());
  materialize(*b, at::kCPU, at::kFloat, random_fill());
  const auto of_a = std::make_shared<FakeSink>(at::kFloat);
  const auto of_b = std::make_shared<FakeSink>(at::kFloat);
  a->set_wgrad_sink(of_a);
  b->set_wgrad_sink(of_b);
  const at::Tensor x = at::randn({5, 4});
  const auto outs = linears(x, {a.get(), b.get()});
  (outs[0].sum() + outs[1].sum()).backward();
  const at::Tensor row = x.sum(0, /*keepdim=*/true);
  EXPECT_LE(relative_error(of_a->grad(a->weight()), row.expand({2, 4})), 1e-6);
  EXPECT_LE(relative_error(of_b->grad(b->weight()), row.expand({3, 4})), 1e-6);
}

TEST(Linears, LayersWithHooksOrABiasAreCalledOneByOne) {
  Linear a(4, 2), b(4, 3, LinearOptions{.bias = true});
  for (LinearImpl* layer : {a.get(), b.get()}) {
    materialize(*layer, at::kCPU, at::kFloat, random_fill());
  }
  b->bias().detach().fill_(7);
  const at::Tensor x = at::randn({5, 4});
  EXPECT_TRUE(linears(x, {a.get(), b.get()})[1].equal(
      at::linear(x, b->weight(), b->bias())));
  int before = 0, after = 0;
  const auto pre =
      a->add_forward_pre_hook([&](Module&, const TensorList&) { ++before; });
  linears(x, {a.get()});
  EXPECT_EQ(before, 1);  // a hook before it does not keep them apart
  const auto post = a->add_forward_hook(
      [&](Module&, const TensorList&, const TensorList& outputs) {
        EXPECT_EQ(outputs.size(), 1U);
        ++after;
      });
  linears(x, {a.get()});
  EXPECT_EQ(before, 2);
  EXPECT_EQ(after, 1);
}

TEST_P(Layers, LinearTakesStridedInputAndFrozenWeights) {
  const at::Tensor x = leaf({3, 4, 5});
  const at::Tensor w = leaf({2, 4}).detach();
  const at::Tensor y = nn::linear(x.transpose(1, 2), w);
  expect_close(
      y,
      at::linear(
          x.detach().transpose(1, 2).to(at::kDouble),
          w.to(at::kDouble)));
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_P(Layers, B64_LinearResultMayBeChangedInPlace) {
  const at::Tensor x = leaf({2, 3, 4}), w = leaf({5, 4});
  nn::linear(x, w).add_(1).sum().backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST_P(Layers, EmbeddingMatchesPlainAutograd) {
  const at::Tensor w = leaf({9, 4});
  const at::Tensor tokens =
      at::tensor({1, 3, 3, 8, 0, 3}, at::kLong).view({2, 3});
  const at::Tensor g = at::randn({2, 3, 4}, generator_).to(GetParam());
  const at::Tensor we = exact(w);
  const at::Tensor y = nn::embedding(tokens, w);
  y.backward(g);
  const at::Tensor ye = at::embedding(we, tokens);
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(w.grad(), we.grad());
  check_sink(
      [&](const ModuleContextPtr& context) {
        nn::embedding(tokens, w, context).backward(g);
      },
      w,
      tolerance(GetParam()));
}

at::Tensor plain_rms_norm(const at::Tensor& x, const at::Tensor& w) {
  return x * (x.square().mean(-1, true) + 1e-5).rsqrt() * w;
}

TEST_P(Layers, RmsNormMatchesPlainAutograd) {
  const at::Tensor x = leaf({3, 5, 33}), w = leaf({33});
  const at::Tensor g = at::randn({3, 5, 33}, generator_).to(GetParam());
  const at::Tensor xe = exact(x), we = exact(w);
  const at::Tensor y = rms_norm(x, w, 1e-5);
  y.backward(g);
  const at::Tensor ye = plain_rms_norm(xe, we);
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(x.grad(), xe.grad());
  expect_close(w.grad(), we.grad());
  check_sink(
      [&](const ModuleContextPtr& context) {
        rms_norm(x, w, 1e-5, context).backward(g);
      },
      w,
      tolerance(GetParam()));
}

TEST_P(Layers, AddRmsNormMatchesPlainAutograd) {
  const at::Tensor x = leaf({6, 16}), d = leaf({6, 16}), w = leaf({16});
  const at::Tensor gs = at::randn({6, 16}, generator_).to(GetParam());
  const at::Tensor gy = at::randn({6, 16}, generator_).to(GetParam());
  const at::Tensor xe = exact(x), de = exact(d), we = exact(w);
  const auto [sum, y] = add_rms_norm(x, d, w, 1e-5);
  torch::autograd::backward({sum, y}, {gs, gy});
  const at::Tensor se = xe + de;
  const at::Tensor ye = plain_rms_norm(se, we);
  torch::autograd::backward({se, ye}, {gs.to(at::kDouble), gy.to(at::kDouble)});
  expect_close(sum, se);
  expect_close(y, ye);
  expect_close(x.grad(), xe.grad());
  expect_close(d.grad(), de.grad());
  expect_close(w.grad(), we.grad());
}

TEST_P(Layers, AddRmsNormWithoutDeltaPassesItsInputOn) {
  const at::Tensor x = leaf({6, 16}), w = leaf({16});
  const at::Tensor gs = at::randn({6, 16}, generator_).to(GetParam());
  const at::Tensor gy = at::randn({6, 16}, generator_).to(GetParam());
  const at::Tensor xe = exact(x), we = exact(w);
  const auto [sum, y] = add_rms_norm(x, {}, w, 1e-5);
  EXPECT_EQ(sum.data_ptr(), x.data_ptr());
  torch::autograd::backward({sum, y}, {gs, gy});
  const at::Tensor ye = plain_rms_norm(xe, we);
  torch::autograd::backward(
      {xe * 1, ye},
      {gs.to(at::kDouble), gy.to(at::kDouble)});
  expect_close(y, ye);
  expect_close(x.grad(), xe.grad());
  expect_close(w.grad(), we.grad());
}

TEST_P(Layers, AddRmsNormWithOneOutputUnused) {
  const at::Tensor x = leaf({6, 16}), d = leaf({6, 16}), w = leaf({16});
  std::get<0>(add_rms_norm(x, d, w, 1e-5)).sum().backward();
  EXPECT_EQ(relative_error(x.grad(), at::ones({6, 16})), 0.0);
  EXPECT_FALSE(w.grad().defined());
  std::get<1>(add_rms_norm(x, d, w, 1e-5)).sum().backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST_P(Layers, RopeMatchesComplexRotationAndItsInverse) {
  const RopeOptions options{.head_dim = 8, .theta = 10000.0};
  RopeTable table(options);
  const auto [cos, sin] = table.get(5, at::kCPU);
  const at::Tensor x = leaf({2, 5, 3, 8});
  const at::Tensor y = rope(x, cos, sin);
  const at::Tensor angle = at::outer(
      at::arange(5, at::kDouble),
      at::tensor(rope_frequencies(options), at::kDouble));
  const at::Tensor turn = at::polar(at::ones_like(angle), angle).unsqueeze(1);
  const auto halves = x.detach().to(at::kDouble).chunk(2, -1);
  const at::Tensor z = at::complex(halves[0], halves[1]) * turn;
  expect_close(y, at::cat({at::real(z), at::imag(z)}, -1));
  y.backward(y.detach());
  expect_close(x.grad(), x.detach().to(at::kDouble));
}

TEST_P(Layers, SwigluMatchesPlainAutograd) {
  const at::Tensor gate = leaf({3, 11}), up = leaf({3, 11});
  const at::Tensor g = at::randn({3, 11}, generator_).to(GetParam());
  const at::Tensor ge = exact(gate), ue = exact(up);
  const at::Tensor y = swiglu(gate, up);
  y.backward(g);
  const at::Tensor ye = at::silu(ge) * ue;
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(gate.grad(), ge.grad());
  expect_close(up.grad(), ue.grad());
}

TEST_P(Layers, SwigluLinearMatchesPlainAutograd) {
  Linear down(11, 6);
  const at::Tensor gate = leaf({3, 11}), up = leaf({3, 11}), r = leaf({3, 6});
  const at::Tensor w = leaf({6, 11}).detach();
  set_parameter_data(down->weight(), w);
  const at::Tensor g = at::randn({3, 6}, generator_).to(GetParam());
  const at::Tensor ge = exact(gate), ue = exact(up), we = exact(w),
                   re = exact(r);
  const at::Tensor y = swiglu_linear(gate, up, *down, r);
  y.backward(g);
  const at::Tensor ye = at::linear(at::silu(ge) * ue, we) + re;
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(gate.grad(), ge.grad());
  expect_close(up.grad(), ue.grad());
  expect_close(down->weight().grad(), we.grad());
  expect_close(r.grad(), re.grad());
  // Only the weight: the activation is needed, its gradient is not.
  down->weight().mutable_grad() = at::Tensor();
  swiglu_linear(gate.detach(), up.detach(), *down, r.detach()).backward(g);
  expect_close(down->weight().grad(), we.grad());
  // Hooks see the activation as the layer's input.
  const auto hook = down->add_forward_hook(
      [&](Module&, const TensorList& inputs, const TensorList&) {
        expect_close(inputs.at(0), at::silu(ge) * ue);
      });
  expect_close(swiglu_linear(gate, up, *down, r), ye);
}

TEST_P(Layers, AttentionMatchesTheSoftmaxFormula) {
  const at::Tensor q = leaf({2, 7, 6, 8}), k = leaf({2, 7, 2, 8}),
                   v = leaf({2, 7, 2, 8});
  const at::Tensor g = at::randn({2, 7, 48}, generator_).to(GetParam());
  const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v);
  const at::Tensor y = causal_attention(q, k, v);
  y.backward(g);
  const auto heads = [](const at::Tensor& t) {
    return t.repeat_interleave(6 / t.size(2), 2).transpose(1, 2);
  };
  const at::Tensor scores =
      at::matmul(heads(qe), heads(ke).transpose(2, 3)) / std::sqrt(8.0);
  const at::Tensor mask = at::ones({7, 7}, at::kBool).tril().logical_not();
  const at::Tensor ye =
      at::matmul(scores.masked_fill(mask, -INFINITY).softmax(-1), heads(ve))
          .transpose(1, 2)
          .reshape({2, 7, 48});
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(q.grad(), qe.grad());
  expect_close(k.grad(), ke.grad());
  expect_close(v.grad(), ve.grad());
}

// Windows shorter and longer than a block of queries and than the sequence.
TEST_P(Layers, AttentionWithWindowsScalesAndSoftCaps) {
  const AttentionArgs cases[] = {
      {.scale = 0.3},
      {.window = 1},
      {.window = 5},
      {.window = 100},
      {.window = 149},
      {.window = 150},
      {.window = 1000},
      {.soft_cap = 0.7},
      {.scale = 0.3, .window = 70, .soft_cap = 1.5}};
  for (const AttentionArgs& args : cases) {
    SCOPED_TRACE(
        std::to_string(args.window) + " " + std::to_string(args.soft_cap));
    const at::Tensor q = leaf({1, 150, 4, 8}), k = leaf({1, 150, 2, 8}),
                     v = leaf({1, 150, 2, 8});
    const at::Tensor g = at::randn({1, 150, 32}, generator_).to(GetParam());
    const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v);
    const at::Tensor y = causal_attention(q, k, v, args);
    y.backward(g);
    const at::Tensor ye = attention_by_formula(qe, ke, ve, args);
    ye.backward(g.to(at::kDouble));
    expect_close(y, ye);
    expect_close(q.grad(), qe.grad());
    expect_close(k.grad(), ke.grad());
    expect_close(v.grad(), ve.grad());
  }
}

TEST_P(Layers, AttentionWithSinks) {
  for (const std::int64_t window : {0, 33, 70}) {
    SCOPED_TRACE(window);
    const at::Tensor q = leaf({2, 150, 4, 8}), k = leaf({2, 150, 2, 8}),
                     v = leaf({2, 150, 2, 8}), sinks = leaf({4});
    const at::Tensor g = at::randn({2, 150, 32}, generator_).to(GetParam());
    const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v),
                     se = exact(sinks);
    const at::Tensor y =
        causal_attention(q, k, v, {.window = window, .sinks = sinks});
    y.backward(g);
    const at::Tensor ye =
        attention_by_formula(qe, ke, ve, {.window = window, .sinks = se});
    ye.backward(g.to(at::kDouble));
    expect_close(y, ye);
    expect_close(q.grad(), qe.grad());
    expect_close(k.grad(), ke.grad());
    expect_close(v.grad(), ve.grad());
    expect_close(sinks.grad(), se.grad());
  }
}

// Documents that start inside and at the border of a block of queries.
TEST_P(Layers, PlainAttentionStaysWithinDocuments) {
  constexpr std::int64_t kLengths[] = {70, 80, 149, 1};
  const at::Tensor document = at::repeat_interleave(
                                  at::arange(4, at::kInt),
                                  at::tensor(at::ArrayRef(kLengths), at::kLong))
                                  .view({2, 150});
  for (const std::int64_t window : {0, 33, 70}) {
    SCOPED_TRACE(window);
    const at::Tensor q = leaf({2, 150, 4, 8}), k = leaf({2, 150, 2, 8}),
                     v = leaf({2, 150, 2, 8}), sinks = leaf({4});
    const at::Tensor g = at::randn({2, 150, 4, 8}, generator_).to(GetParam());
    const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v),
                     se = exact(sinks);
    const at::Tensor y = plain_attention(
        q,
        k,
        v,
        {.window = window, .soft_cap = 1.5, .sinks = sinks},
        document);
    y.backward(g);
    TensorList parts;
    std::int64_t begin = 0;
    for (const std::int64_t length : kLengths) {
      const auto of = [&](const at::Tensor& x) {
        return x.flatten(0, 1).narrow(0, begin, length).unsqueeze(0);
      };
      parts.push_back(attention_by_formula(
          of(qe),
          of(ke),
          of(ve),
          {.window = window, .soft_cap = 1.5, .sinks = se}));
      begin += length;
    }
    const at::Tensor ye = at::cat(parts, 1).view({2, 150, 4, 8});
    ye.backward(g.to(at::kDouble));
    expect_close(y, ye);
    expect_close(q.grad(), qe.grad());
    expect_close(k.grad(), ke.grad());
    expect_close(v.grad(), ve.grad());
    expect_close(sinks.grad(), se.grad());
  }
}

TEST_P(Layers, RopeOfAPartOfTheHead) {
  RopeTable table({.head_dim = 4, .theta = 100.0});
  const auto [cos, sin] = table.get(5, at::kCPU);
  const at::Tensor x = leaf({2, 5, 3, 8});
  const at::Tensor y = rope(x, cos, sin);
  EXPECT_TRUE(y.narrow(3, 4, 4).equal(x.narrow(3, 4, 4)));
  EXPECT_TRUE(y.narrow(3, 0, 4).equal(
      rope(x.detach().narrow(3, 0, 4).contiguous(), cos, sin)));
  y.backward(y.detach());
  expect_close(x.grad(), x.detach().to(at::kDouble));
}

TEST_P(Layers, NormByOnePlusItsWeight) {
  RmsNorm norm(16, RmsNormOptions{.eps = 1e-5, .adds_one = true});
  EXPECT_EQ(norm->init_spec("weight").kind, InitSpec::zeros().kind);
  const at::Tensor w = leaf({16}).detach() * 0.1;
  set_parameter_data(norm->weight(), w);
  const at::Tensor x = leaf({6, 16});
  const at::Tensor g = at::randn({6, 16}, generator_).to(GetParam());
  const at::Tensor xe = exact(x), we = exact(w);
  const at::Tensor y = norm(x);
  y.backward(g);
  const at::Tensor ye =
      xe * (xe.square().mean(-1, true) + 1e-5).rsqrt() * (we + 1);
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(x.grad(), xe.grad());
  expect_close(norm->weight().grad(), we.grad());
}

TEST_P(Layers, GegluLinearMatchesPlainAutograd) {
  for (const bool adds : {false, true}) {
    Linear down(11, 6);
    const at::Tensor gate = leaf({3, 11}), up = leaf({3, 11});
    const at::Tensor r = adds ? leaf({3, 6}) : at::Tensor();
    const at::Tensor w = leaf({6, 11}).detach();
    set_parameter_data(down->weight(), w);
    const at::Tensor g = at::randn({3, 6}, generator_).to(GetParam());
    const at::Tensor ge = exact(gate), ue = exact(up), we = exact(w);
    const auto activation = GateActivation::gelu_tanh;
    const at::Tensor y = gated_linear(activation, gate, up, *down, r);
    y.backward(g);
    at::Tensor ye = at::linear(at::gelu(ge, "tanh") * ue, we);
    if (adds) {
      ye = ye + r.detach().to(at::kDouble);
      expect_close(r.grad(), g.to(at::kDouble));
    }
    ye.backward(g.to(at::kDouble));
    expect_close(y, ye);
    expect_close(gate.grad(), ge.grad());
    expect_close(up.grad(), ue.grad());
    expect_close(down->weight().grad(), we.grad());
    expect_close(gated(activation, gate, up), at::gelu(ge, "tanh") * ue);
  }
}

// Gates and ups on both sides of their limits.
TEST_P(Layers, ClampedGateMatchesPlainAutograd) {
  const auto activation = GateActivation::clamped_silu;
  Linear down(11, 6);
  const at::Tensor gate = (leaf({30, 11}).detach() * 6).requires_grad_();
  const at::Tensor up = (leaf({30, 11}).detach() * 6).requires_grad_();
  const at::Tensor w = leaf({6, 11}).detach();
  set_parameter_data(down->weight(), w);
  const at::Tensor g = at::randn({30, 6}, generator_).to(GetParam());
  const at::Tensor ge = exact(gate), ue = exact(up), we = exact(w);
  const at::Tensor y = gated_linear(activation, gate, up, *down, {});
  y.backward(g);
  const at::Tensor limited = ge.clamp_max(7);
  const at::Tensor product =
      (ue.clamp(-7, 7) + 1) * limited * (limited * 1.702).sigmoid();
  const at::Tensor ye = at::linear(product, we);
  ye.backward(g.to(at::kDouble));
  expect_close(y, ye);
  expect_close(gate.grad(), ge.grad());
  expect_close(up.grad(), ue.grad());
  expect_close(down->weight().grad(), we.grad());
  EXPECT_TRUE(ge.gt(7).any().item<bool>() && ue.lt(-7).any().item<bool>());
}

TEST_P(Layers, ScaledEmbeddingRoundsItsScale) {
  Embedding table(5, 4, InitSpec::normal(0.0F, 1.0F), std::sqrt(3.0));
  set_parameter_data(table->weight(), leaf({5, 4}).detach());
  const at::Tensor tokens = at::tensor({4, 0, 4}, at::kLong);
  const at::Tensor rounded = at::scalar_tensor(std::sqrt(3.0)).to(GetParam());
  const at::Tensor y = table(tokens);
  EXPECT_TRUE(y.equal(table->weight().index_select(0, tokens) * rounded));
  y.sum().backward();
  expect_close(
      table->weight().grad().select(0, 4),
      at::full({4}, 2.0 * rounded.item<double>(), at::kDouble));
}

TEST(Rope, LinearDividesAllRotations) {
  const RopeOptions plain{.head_dim = 16, .theta = 10000.0};
  RopeOptions scaled = plain;
  scaled.scaling = RopeScaling{.type = RopeType::linear, .factor = 4.0};
  const auto a = rope_frequencies(plain), b = rope_frequencies(scaled);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_DOUBLE_EQ(b[i], a[i] / 4);
  }
}

TEST(Rope, DynamicStretchesLongSequencesAlone) {
  const RopeOptions plain{.head_dim = 16, .theta = 10000.0};
  RopeOptions scaled = plain;
  scaled.scaling = RopeScaling{
      .type = RopeType::dynamic,
      .factor = 2.0,
      .original_max_positions = 8};
  EXPECT_EQ(rope_frequencies(scaled, 8), rope_frequencies(plain));
  RopeOptions longer = plain;
  longer.theta = 10000.0 * std::pow(2.0 * 12 / 8 - 1.0, 16.0 / 14.0);
  EXPECT_EQ(rope_frequencies(scaled, 12), rope_frequencies(longer));
  // A table changes with the length, both ways.
  RopeTable table(scaled), of_plain(plain), of_longer(longer);
  const auto sin = [](RopeTable& of, std::int64_t seq) {
    return of.get(seq, at::kCPU).second;
  };
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(sin(table, 8).equal(sin(of_plain, 8)));
    EXPECT_TRUE(sin(table, 12).equal(sin(of_longer, 12)));
    EXPECT_TRUE(sin(table, 4).equal(sin(of_plain, 4)));
  }
}

TEST(Rope, YarnKeepsFastRotationsAndScalesAttention) {
  RopeOptions options{.head_dim = 64, .theta = 10000.0};
  const auto a = rope_frequencies(options);
  options.scaling = RopeScaling{
      .type = RopeType::yarn,
      .factor = 8.0,
      .original_max_positions = 4096,
      .attention_factor = yarn_attention_factor(8.0)};
  const auto b = rope_frequencies(options);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double turns = 4096.0 * a[i] / (2 * std::numbers::pi);
    if (turns > 45.0) {
      EXPECT_DOUBLE_EQ(b[i], a[i]) << i;
    } else if (turns < 0.7) {
      EXPECT_DOUBLE_EQ(b[i], a[i] / 8) << i;
    }
  }
  RopeTable table(options);
  const at::Tensor first = table.get(4, at::kCPU).first.select(0, 0);
  EXPECT_TRUE(at::allclose(first, at::full_like(first, 1.2079441)));
  EXPECT_EQ(yarn_attention_factor(1.0), 1.0);
}

TEST(Rope, LongropeHasFactorsForShortAndForLong) {
  RopeOptions options{.head_dim = 4, .theta = 100.0};
  const auto a = rope_frequencies(options);
  options.scaling = RopeScaling{
      .type = RopeType::longrope,
      .original_max_positions = 8,
      .short_factors = {1.0, 2.0},
      .long_factors = {3.0, 4.0}};
  EXPECT_EQ(
      rope_frequencies(options, 8),
      (std::vector<double>{a[0], a[1] / 2}));
  EXPECT_EQ(
      rope_frequencies(options, 9),
      (std::vector<double>{a[0] / 3, a[1] / 4}));
}

TEST(Rope, LlamaScalingKeepsFastAndStretchesSlowRotations) {
  const RopeOptions plain{.head_dim = 128, .theta = 500000.0};
  RopeOptions scaled = plain;
  scaled.scaling = RopeScaling{};
  const auto a = rope_frequencies(plain), b = rope_frequencies(scaled);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double wavelength = 2 * std::numbers::pi / a[i];
    if (wavelength < 8192.0 / 4.0) {
      EXPECT_DOUBLE_EQ(b[i], a[i]);
    } else if (wavelength > 8192.0) {
      EXPECT_DOUBLE_EQ(b[i], a[i] / 8.0);
    } else {
      EXPECT_LT(b[i], a[i]);
      EXPECT_GT(b[i], a[i] / 8.0);
    }
  }
}

TEST(Linear, SecondDerivativesTakeThePlainPath) {
  const at::Tensor x = at::randn({3, 4}).requires_grad_();
  const at::Tensor w = at::randn({2, 4}).requires_grad_();
  const auto sink = std::make_shared<FakeSink>(at::kFloat);
  const auto context = c10::make_intrusive<ModuleContext>();
  context->wgrad_sink = sink;
  const at::Tensor y = nn::linear(x, w, {}, {}, context).pow(3).sum();
  const auto first = torch::autograd::grad({y}, {w}, {}, true, true);
  first[0].sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(RmsNorm, B29_RefusesCreateGraphByName) {
  const at::Tensor x = at::randn({3, 4}).requires_grad_();
  const at::Tensor y = rms_norm(x, at::ones({4}), 1e-5).sum();
  try {
    torch::autograd::grad({y}, {x}, {}, true, true);
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("RMSNorm"), std::string::npos);
  }
}

TEST(Layers, WrongShapesAreRefused) {
  EXPECT_THROW(nn::linear(at::ones({2, 3}), at::ones({4, 5})), Error);
  EXPECT_THROW(rms_norm(at::ones({2, 3}), at::ones({4}), 1e-5), Error);
  EXPECT_THROW(swiglu(at::ones({2, 3}), at::ones({3, 2})), Error);
  EXPECT_THROW(nn::embedding(at::ones({2}), at::ones({4, 5})), Error);
  EXPECT_THROW(
      causal_attention(
          at::ones({1, 2, 3, 4}),
          at::ones({1, 2, 2, 4}),
          at::ones({1, 2, 2, 4})),
      Error);
}

TEST(Dropout, ScalesAndFollowsItsGenerator) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  Dropout dropout(0.25, generator);
  const at::Tensor x = at::ones({10000});
  const at::Tensor a = dropout(x);
  generator.set_current_seed(3);
  EXPECT_TRUE(at::equal(a, dropout(x)));
  EXPECT_FALSE(at::equal(a, dropout(x)));
  // Standard deviation of the mean: sqrt(p / (1 - p) / n) = 0.0058.
  EXPECT_NEAR(a.mean().item<float>(), 1.0, 6 * 0.0058);
  dropout->eval();
  EXPECT_TRUE(dropout(x).is_same(x));
}

}  // namespace
}  // namespace flatshard::nn
