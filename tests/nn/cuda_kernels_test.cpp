#include <gtest/gtest.h>

#include "attention_reference.h"
#include "check.h"
#include "flatshard/core/error.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/embedding.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/loss.h"
#include "flatshard/nn/norm_linears.h"
#include "flatshard/nn/rms_norm.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/ops/cuda_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

// Every CUDA path against float64 on the CPU, over random shapes with odd sizes
// and rows that 16-byte loads do not support. Skips itself without a GPU.
namespace flatshard::nn {
namespace {

struct Shape {
  std::int64_t rows;
  std::int64_t dim;
};

class CudaKernels : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    at::globalContext().setAllowTF32CuBLAS(false);
  }

  at::ScalarType dtype() const { return GetParam(); }
  // Float32 kernels use fast exponentials (2 ulp plus 2^-21 for large
  // arguments) and sum up to 20000 terms in trees: 2^-17. bfloat16: 4 stages
  // of half an ulp.
  double tolerance() const {
    return dtype() == at::kBFloat16 ? 4 * epsilon(dtype()) : 0x1p-17;
  }
  at::Tensor leaf(std::vector<std::int64_t> shape) {
    return at::randn(shape, generator_)
        .to(dtype())
        .to(at::kCUDA)
        .requires_grad_();
  }
  at::Tensor gradient(std::vector<std::int64_t> shape) {
    return at::randn(shape, generator_).to(dtype()).to(at::kCUDA);
  }
  static at::Tensor exact(const at::Tensor& tensor) {
    return tensor.detach().cpu().to(at::kDouble).requires_grad_();
  }
  void expect_close(
      const at::Tensor& got,
      const at::Tensor& want,
      const char* what) {
    ASSERT_TRUE(got.defined()) << what;
    EXPECT_EQ(got.scalar_type(), dtype()) << what;
    EXPECT_LE(relative_error(got.cpu(), want), tolerance()) << what;
  }
  std::vector<Shape> shapes(std::int64_t largest) {
    std::vector<Shape> found{
        {1, 1},
        {3, 7},
        {5, 8},
        {2, 4096},
        {300, 2048},
        {9000, 128},
        {65, 64},
        {77, 256},
        {33, 24},
        {4, largest},
        {3, largest - 1}};
    for (int i = 0; i < 8; ++i) {
      found.push_back(
          {static_cast<std::int64_t>(1 + random_() % 600),
           static_cast<std::int64_t>(1 + random_() % largest)});
    }
    return found;
  }

  std::mt19937_64 random_{17};
  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(17);
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaKernels,
    ::testing::Values(at::kFloat, at::kBFloat16),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& w) {
  return x * (x.square().mean(-1, true) + 1e-5).rsqrt() * w;
}

TEST_P(CudaKernels, RmsNorm) {
  for (const auto& [rows, dim] : shapes(16384)) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << dim);
    const at::Tensor x = leaf({rows, dim}), w = leaf({dim});
    const at::Tensor g = gradient({rows, dim});
    const at::Tensor xe = exact(x), we = exact(w);
    const at::Tensor y = rms_norm(x, w, 1e-5);
    y.backward(g);
    const at::Tensor ye = plain_norm(xe, we);
    ye.backward(g.cpu().to(at::kDouble));
    expect_close(y, ye, "y");
    // dx is a difference whose terms are of the size of g w / rms(x). For one
    // column nothing but their rounding is left.
    const double terms = (g.cpu().to(at::kDouble) * we.detach() *
                          (xe.detach().square().mean(-1, true) + 1e-5).rsqrt())
                             .abs()
                             .max()
                             .item<double>();
    EXPECT_LE(
        (x.grad().cpu().to(at::kDouble) - xe.grad()).abs().max().item<double>(),
        tolerance() * terms);
    expect_close(w.grad(), we.grad(), "dw");
  }
}

// Other blocks than with partial sums of the weight's gradient, the same rows.
TEST_P(CudaKernels, RmsNormOfAFrozenWeight) {
  for (const auto& [rows, dim] : shapes(16384)) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << dim);
    const at::Tensor x = leaf({rows, dim}), w = leaf({dim});
    const at::Tensor g = gradient({rows, dim});
    rms_norm(x, w, 1e-5).backward(g);
    const at::Tensor y = leaf({rows, dim});
    y.set_data(x.detach());
    rms_norm(y, w.detach(), 1e-5).backward(g);
    EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  }
}

TEST_P(CudaKernels, AddRmsNormAndTheSink) {
  for (const auto& [rows, dim] : shapes(5000)) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << dim);
    const at::Tensor x = leaf({rows, dim}), d = leaf({rows, dim});
    const at::Tensor w = leaf({dim});
    const at::Tensor gs = gradient({rows, dim}), gy = gradient({rows, dim});
    const at::Tensor xe = exact(x), de = exact(d), we = exact(w);
    const auto sink = std::make_shared<FakeSink>(at::kFloat);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    for (int round = 1; round <= 2; ++round) {
      x.mutable_grad() = at::Tensor();
      const auto [sum, y] = add_rms_norm(x, d, w, 1e-5, context);
      torch::autograd::backward({sum, y}, {gs, gy});
      we.mutable_grad() = xe.mutable_grad() = at::Tensor();
      // The reference reads the rounded sum, as the kernel normalizes that.
      const at::Tensor se = exact(sum);
      const at::Tensor ye = plain_norm(se, we);
      torch::autograd::backward(
          {se * 1, ye},
          {gs.cpu().to(at::kDouble), gy.cpu().to(at::kDouble)});
      expect_close(sum, xe + de, "sum");
      expect_close(y, ye, "y");
      expect_close(x.grad(), se.grad(), "dx");
      EXPECT_LE(
          relative_error(sink->grad(w).cpu(), we.grad() * round),
          tolerance());
    }
  }
}

TEST_P(CudaKernels, RmsNormWithAFloatWeight) {
  const at::Tensor x = leaf({33, 512});
  const at::Tensor w =
      at::randn({512}, generator_).to(at::kCUDA).requires_grad_();
  const at::Tensor y = rms_norm(x, w, 1e-5);
  const at::Tensor xe = exact(x), we = exact(w);
  y.sum().backward();
  const at::Tensor ye = plain_norm(xe, we);
  ye.sum().backward();
  expect_close(y, ye, "y");
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  EXPECT_LE(relative_error(w.grad().cpu(), we.grad()), tolerance());
}

TEST_P(CudaKernels, Rope) {
  for (const std::int64_t head_dim : {2, 6, 16, 64, 128, 130}) {
    SCOPED_TRACE(head_dim);
    RopeTable table({.head_dim = head_dim, .theta = 10000.0});
    const at::Tensor x = leaf({2, 37, 5, head_dim});
    const at::Tensor g = gradient({2, 37, 5, head_dim});
    const at::Tensor xe = x.detach().cpu().to(at::kFloat).requires_grad_();
    const auto [cos, sin] = table.get(37, at::kCPU);
    const at::Tensor y = rope(x, cos.to(at::kCUDA), sin.to(at::kCUDA));
    y.backward(g);
    const at::Tensor ye = rope(xe, cos, sin);
    ye.backward(g.cpu().to(at::kFloat));
    expect_close(y, ye, "y");
    expect_close(x.grad(), xe.grad(), "dx");
    at::Tensor in_place = x.detach().clone();
    cuda::rope(in_place, in_place, cos.to(at::kCUDA), sin.to(at::kCUDA), false);
    EXPECT_TRUE(at::equal(in_place, y));
  }
}

TEST_P(CudaKernels, Swiglu) {
  for (const auto& [rows, dim] : shapes(4000)) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << dim);
    const at::Tensor gate = leaf({rows, dim}), up = leaf({rows, dim});
    const at::Tensor g = gradient({rows, dim});
    const at::Tensor ge = exact(gate), ue = exact(up);
    const at::Tensor y = swiglu(gate, up);
    y.backward(g);
    const at::Tensor ye = at::silu(ge) * ue;
    ye.backward(g.cpu().to(at::kDouble));
    expect_close(y, ye, "y");
    expect_close(gate.grad(), ge.grad(), "dgate");
    expect_close(up.grad(), ue.grad(), "dup");
    // The output again, written over the gradient that it was computed from.
    at::Tensor d = g.clone();
    const auto [dgate, dup] =
        cuda::swiglu_backward(d, gate.detach(), up.detach(), &d);
    EXPECT_TRUE(at::equal(dgate, gate.grad()));
    EXPECT_TRUE(at::equal(dup, up.grad()));
    EXPECT_TRUE(at::equal(d, y));
  }
  // A start address that 16-byte loads do not support.
  const at::Tensor gate = leaf({1001}), up = leaf({1001});
  expect_close(
      swiglu(gate.narrow(0, 1, 1000), up.narrow(0, 1, 1000)),
      at::silu(exact(gate)).narrow(0, 1, 1000) * exact(up).narrow(0, 1, 1000),
      "unaligned");
}

TEST_P(CudaKernels, CrossEntropy) {
  for (const auto& [rows, vocab] : shapes(20001)) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << vocab);
    at::Tensor logits = (gradient({rows, vocab}) * 4).contiguous();
    at::Tensor targets = at::randint(vocab, {rows}, generator_, at::kLong);
    if (rows > 1) {
      targets[0] = -100;
    }
    const at::Tensor le = exact(logits);
    const at::TensorOptions f32 =
        at::TensorOptions().device(at::kCUDA).dtype(at::kFloat);
    const at::Tensor scale = at::full({}, 0.5, f32);
    at::Tensor loss = at::empty({rows}, f32), lse = at::empty({rows}, f32);
    const at::Tensor cuda_targets = targets.to(at::kCUDA);
    at::Tensor again = logits.clone();
    cuda::cross_entropy(
        logits,
        cuda_targets,
        scale,
        loss,
        lse,
        {.write_gradient = true});
    const at::Tensor want =
        at::cross_entropy_loss(le, targets, {}, at::Reduction::None);
    (want.sum() * 0.5).backward();
    EXPECT_LE(
        (loss.cpu() - want).abs().max().item<double>(),
        // lse of numbers up to 20: absolute error of a few float ulps of it
        20 * 0x1p-20);
    expect_close(logits, le.grad(), "dlogits");
    at::Tensor none;
    cuda::cross_entropy(
        again,
        cuda_targets,
        scale,
        none,
        lse,
        {.lse_is_given = true, .write_gradient = true});
    // exp(x - lse) here, exp(x - max) / sum there: equal except for rounding.
    expect_close(again, le.grad(), "dlogits from the given lse");
  }
}

TEST_P(CudaKernels, AnUnknownTargetMakesTheLossNaN) {
  const at::Tensor h = leaf({2, 8}), w = leaf({16, 8});
  const at::Tensor targets = at::tensor({3, 16}, at::kLong).to(at::kCUDA);
  EXPECT_TRUE(std::isnan(linear_cross_entropy(h, w, targets).item<float>()));
}

TEST_P(CudaKernels, LinearCrossEntropyBothWays) {
  const at::Tensor h = leaf({130, 64}), w = leaf({1003, 64});
  const at::Tensor targets = at::randint(1003, {130}, generator_, at::kLong);
  const at::Tensor he = exact(h), we = exact(w);
  const at::Tensor want = at::cross_entropy_loss(at::linear(he, we), targets);
  want.backward();
  for (const std::int64_t chunk : {0, 48}) {
    h.mutable_grad() = w.mutable_grad() = at::Tensor();
    const at::Tensor loss = linear_cross_entropy(
        h,
        w,
        targets.to(at::kCUDA),
        {.chunk_tokens = chunk});
    loss.backward();
    // Logits of up to 32 rounded to the compute dtype: 8 times the tolerance.
    EXPECT_LE(relative_error(loss.cpu(), want), 8 * tolerance());
    EXPECT_LE(relative_error(h.grad().cpu(), he.grad()), 8 * tolerance());
    EXPECT_LE(relative_error(w.grad().cpu(), we.grad()), 8 * tolerance());
  }
}

TEST_P(CudaKernels, AttentionWithGroupedHeads) {
  for (const std::int64_t kv : {8, 2, 1}) {
    SCOPED_TRACE(kv);
    const at::Tensor q = leaf({2, 130, 8, 64}), k = leaf({2, 130, kv, 64}),
                     v = leaf({2, 130, kv, 64});
    const at::Tensor g = gradient({2, 130, 512});
    const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v);
    const at::Tensor y = causal_attention(q, k, v);
    y.backward(g);
    const at::Tensor ye = causal_attention(qe, ke, ve);
    ye.backward(g.cpu().to(at::kDouble));
    expect_close(y, ye, "y");
    expect_close(q.grad(), qe.grad(), "dq");
    expect_close(k.grad(), ke.grad(), "dk");
    expect_close(v.grad(), ve.grad(), "dv");
    EXPECT_TRUE(y.is_contiguous());
  }
}

// FlashAttention has 16-bit window sizes, and supports wider heads than
// cuDNN.
TEST_P(CudaKernels, AttentionWithWindows) {
  for (const std::int64_t head_dim : {64, 256}) {
    for (const std::int64_t window : {0, 1, 33, 129, 130}) {
      SCOPED_TRACE(fmt::format("{} {}", head_dim, window));
      const AttentionArgs args{
          .scale = 0.1,
          .window = window,
          .plain = dtype() == at::kFloat};
      const at::Tensor q = leaf({2, 130, 4, head_dim}),
                       k = leaf({2, 130, 2, head_dim}),
                       v = leaf({2, 130, 2, head_dim});
      const at::Tensor g = gradient({2, 130, 4 * head_dim});
      const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v);
      const at::Tensor y = causal_attention(q, k, v, args);
      y.backward(g);
      const at::Tensor ye = attention_by_formula(qe, ke, ve, args);
      ye.backward(g.cpu().to(at::kDouble));
      expect_close(y, ye, "y");
      expect_close(q.grad(), qe.grad(), "dq");
      expect_close(k.grad(), ke.grad(), "dk");
      expect_close(v.grad(), ve.grad(), "dv");
      EXPECT_TRUE(y.is_contiguous());
    }
  }
}

TEST_P(CudaKernels, AttentionWithSinks) {
  for (const std::int64_t window : {0, 33}) {
    SCOPED_TRACE(window);
    const at::Tensor q = leaf({2, 130, 8, 64}), k = leaf({2, 130, 2, 64}),
                     v = leaf({2, 130, 2, 64}), sinks = leaf({8});
    const at::Tensor g = gradient({2, 130, 8 * 64});
    const at::Tensor qe = exact(q), ke = exact(k), ve = exact(v),
                     se = exact(sinks);
    const at::Tensor y = causal_attention(
        q,
        k,
        v,
        {.window = window, .plain = dtype() == at::kFloat, .sinks = sinks});
    y.backward(g);
    const at::Tensor ye =
        attention_by_formula(qe, ke, ve, {.window = window, .sinks = se});
    ye.backward(g.cpu().to(at::kDouble));
    expect_close(y, ye, "y");
    expect_close(q.grad(), qe.grad(), "dq");
    expect_close(k.grad(), ke.grad(), "dk");
    expect_close(v.grad(), ve.grad(), "dv");
    expect_close(sinks.grad(), se.grad(), "dsinks");
  }
}

TEST_P(CudaKernels, PlainAttentionHasToBeAskedFor) {
  const at::Tensor q = leaf({1, 9, 2, 8});
  AttentionArgs args{.window = 4, .soft_cap = 2.0};
  try {
    causal_attention(q, q, q, args);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    EXPECT_NE(
        error.message().find("set model.plain_attention = true"),
        std::string::npos);
  }
  args.plain = true;
  const at::Tensor qe = exact(q);
  expect_close(
      causal_attention(q, q, q, args),
      attention_by_formula(qe, qe, qe, args),
      "y");
}

// Kernels take 1 + weight in float32, whatever the dtype of the rows.
TEST_P(CudaKernels, NormByOnePlusItsWeightBeforeLinears) {
  RmsNorm norm(64, RmsNormOptions{.eps = 1e-6, .adds_one = true});
  const LinearOptions biased{.bias = true};
  Linear a(64, 48, biased), b(64, 32, biased);
  for (const at::Tensor& p :
       {norm->weight(), a->weight(), b->weight(), a->bias(), b->bias()}) {
    set_parameter_data(p, gradient(p.sizes().vec()) * 0.1);
  }
  const at::Tensor x = leaf({7, 64}), delta = leaf({7, 64});
  const NormLinears got = norm_linears(x, delta, *norm, {a.get(), b.get()});
  const at::Tensor ga = gradient({7, 48}), gb = gradient({7, 32});
  torch::autograd::backward({got.outs[0], got.outs[1]}, {ga, gb});
  const at::Tensor we = exact(norm->weight()), ae = exact(a->weight()),
                   be = exact(b->weight()), ab = exact(a->bias()),
                   bb = exact(b->bias()), xe = exact(got.sum);
  const at::Tensor normed =
      xe * (xe.square().mean(-1, true) + 1e-6).rsqrt() * (1 + we);
  const at::Tensor ya = at::linear(normed, ae, ab);
  const at::Tensor yb = at::linear(normed, be, bb);
  torch::autograd::backward(
      {ya, yb},
      {ga.cpu().to(at::kDouble), gb.cpu().to(at::kDouble)});
  expect_close(got.outs[0], ya, "a");
  expect_close(got.outs[1], yb, "b");
  expect_close(x.grad(), xe.grad(), "dx");
  expect_close(norm->weight().grad(), we.grad(), "dnorm");
  expect_close(a->weight().grad(), ae.grad(), "da");
  expect_close(b->bias().grad(), bb.grad(), "dbias");
}

TEST_P(CudaKernels, GegluLinearMatchesItsFormula) {
  Linear down(96, 64);
  const at::Tensor w = gradient({64, 96});
  set_parameter_data(down->weight(), w);
  const at::Tensor gate = leaf({9, 96}), up = leaf({9, 96}), r = leaf({9, 64});
  const at::Tensor g = gradient({9, 64});
  const at::Tensor ge = exact(gate), ue = exact(up), we = exact(w),
                   re = exact(r);
  const at::Tensor y =
      gated_linear(GateActivation::gelu_tanh, gate, up, *down, r);
  y.backward(g);
  const at::Tensor ye = at::linear(at::gelu(ge, "tanh") * ue, we) + re;
  ye.backward(g.cpu().to(at::kDouble));
  expect_close(y, ye, "y");
  expect_close(gate.grad(), ge.grad(), "dgate");
  expect_close(up.grad(), ue.grad(), "dup");
  expect_close(down->weight().grad(), we.grad(), "dw");
}

TEST_P(CudaKernels, LinearCrossEntropyOfCappedLogits) {
  const at::Tensor h = leaf({70, 64}), w = leaf({203, 64});
  const at::Tensor targets = at::randint(203, {70}, generator_, at::kLong);
  const at::Tensor he = exact(h), we = exact(w);
  const at::Tensor want = at::cross_entropy_loss(
      20.0 * (at::linear(he, we) / 20.0).tanh(),
      targets);
  want.backward();
  const at::Tensor loss =
      linear_cross_entropy(h, w, targets.to(at::kCUDA), {.soft_cap = 20.0});
  loss.backward();
  EXPECT_LE(relative_error(loss.cpu(), want), 8 * tolerance());
  EXPECT_LE(relative_error(h.grad().cpu(), he.grad()), 8 * tolerance());
  EXPECT_LE(relative_error(w.grad().cpu(), we.grad()), 8 * tolerance());
}

TEST_P(CudaKernels, LinearAndEmbeddingIntoTheSink) {
  const at::Tensor table = leaf({50, 64}), w = leaf({32, 64});
  const at::Tensor r = leaf({3, 5, 32});
  const at::Tensor tokens = at::randint(50, {3, 5}, generator_, at::kLong);
  const at::Tensor g = gradient({3, 5, 32});
  const at::Tensor te = exact(table), we = exact(w);
  at::linear(at::embedding(te, tokens), we).backward(g.cpu().to(at::kDouble));
  for (const at::ScalarType grad_dtype : {dtype(), at::kFloat}) {
    const auto sink = std::make_shared<FakeSink>(grad_dtype);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    for (int round = 1; round <= 2; ++round) {
      const at::Tensor x = nn::embedding(tokens.to(at::kCUDA), table, context);
      nn::linear(x, w, {}, r, context).backward(g);
      EXPECT_LE(
          relative_error(sink->grad(w).cpu(), we.grad() * round),
          tolerance());
      EXPECT_LE(
          relative_error(sink->grad(table).cpu(), te.grad() * round),
          tolerance());
    }
  }
}

TEST_P(CudaKernels, EmbeddingOfAPartOfATensor) {
  const at::Tensor table = leaf({50, 64});
  const at::Tensor tokens = at::randint(50, {3, 5}, generator_, at::kLong);
  const at::Tensor g = gradient({3, 5, 128}).narrow(-1, 64, 64);
  const at::Tensor te = exact(table);
  at::embedding(te, tokens).backward(g.cpu().to(at::kDouble));
  const auto sink = std::make_shared<FakeSink>(at::kFloat);
  const auto context = c10::make_intrusive<ModuleContext>();
  context->wgrad_sink = sink;
  nn::embedding(tokens.to(at::kCUDA), table, context).backward(g);
  EXPECT_LE(relative_error(sink->grad(table).cpu(), te.grad()), tolerance());
}

TEST_P(CudaKernels, RowsOfTokensAreAddedToATable) {
  constexpr std::int64_t kTableRows = 40;
  // At most 64 and 16 additions of half a unit each, and the sum of magnitudes
  // is at most 12 times the largest sum.
  constexpr double kTolerance = 0x1p-14;
  struct Case {
    std::int64_t tokens, ids, dim;
  };
  // Many different ids, one, and a few that have long runs; not all are in the
  // table.
  for (const auto& [tokens, ids, dim] : std::initializer_list<Case>{
           {0, 1, 8},
           {1, 1, 8},
           {64, 1, 8},
           {65, 1, 8},
           {1000, 1, 63},
           {1000, 3, 64},
           {333, 45, 2000},
           {2000, 45, 61}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} ids, dim {}", tokens, ids, dim));
    const at::Tensor index = at::randint(ids, {tokens}, generator_, at::kLong);
    const at::Tensor rows = gradient({tokens, dim});
    const at::Tensor table =
        at::ones({kTableRows, dim}, at::TensorOptions(at::kCUDA));
    at::Tensor want = at::zeros({ids, dim}, at::kDouble);
    want.index_add_(0, index, rows.cpu().to(at::kDouble));
    const at::Tensor first = table.clone();
    cuda::add_token_rows(first, index.cuda(), rows);
    const std::int64_t known = std::min(ids, kTableRows);
    const at::Tensor found = first.cpu().to(at::kDouble) - 1.0;
    EXPECT_LE(
        relative_error(found.slice(0, 0, known), want.slice(0, 0, known)),
        kTolerance);
    EXPECT_TRUE(found.slice(0, known).eq(0).all().item<bool>());
    const at::Tensor second = table.clone();
    cuda::add_token_rows(second, index.cuda(), rows);
    EXPECT_TRUE(at::equal(second, first));
  }
}

}  // namespace
}  // namespace flatshard::nn
