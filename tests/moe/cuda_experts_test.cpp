#include <gtest/gtest.h>

#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/router.h"
#include "router_oracle.h"
#include "tests/nn/check.h"

#include <cmath>
#include <functional>
#include <random>

// The CUDA kernels of routers and experts against the CPU, or float64 on it.
// Skips itself without a GPU.
namespace flatshard::nn {
namespace {

class CudaExperts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
    at::globalContext().setAllowTF32CuBLAS(false);
  }
  at::Tensor random(
      std::vector<std::int64_t> shape,
      at::ScalarType dtype = at::kFloat) {
    return at::randn(shape, generator_).to(dtype).to(at::kCUDA);
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(17);
};

// See CudaKernels: fast exponentials, sums of up to 1024 terms in trees.
constexpr double kCudaTolerance = 0x1p-17;

TEST_F(CudaExperts, RouterMatchesTheCpu) {
  for (RouterOptions o : router_rules()) {
    for (const std::int64_t experts : {16, 64, 1000}) {
      for (const bool biased : {false, true}) {
        SCOPED_TRACE(::testing::Message() << experts << ' ' << biased);
        const at::Tensor logits = random({517, experts}) * 2;
        const at::Tensor bias = biased ? random({experts}) * 0.3 : at::Tensor();
        const at::Tensor on_gpu = logits.clone().requires_grad_();
        const at::Tensor on_cpu = logits.cpu().requires_grad_();
        const Routing want =
            route(on_cpu, biased ? bias.cpu() : at::Tensor(), o);
        const Routing got = route(on_gpu, bias, o);
        // Scores that differ in the last bit may change places.
        const double same = got.experts.cpu()
                                .eq(want.experts)
                                .to(at::kDouble)
                                .mean()
                                .item<double>();
        EXPECT_GE(same, 0.995);
        const at::Tensor counted =
            at::bincount(got.experts.cpu().flatten(), {}, experts);
        EXPECT_TRUE(at::equal(got.counts.cpu(), counted.to(at::kInt)));
        // The rest with the CPU's choice.
        const Routing chosen{
            .experts = want.experts.cuda(),
            .counts = want.counts.cuda()};
        const Routing again = route(on_gpu, bias, o, {.chosen = &chosen});
        EXPECT_LE(
            relative_error(again.weights.cpu(), want.weights),
            kCudaTolerance);
        const at::Tensor g = random({517, o.experts_per_token});
        again.weights.backward(g);
        want.weights.backward(g.cpu());
        EXPECT_LE(
            relative_error(on_gpu.grad().cpu(), on_cpu.grad()),
            kCudaTolerance);
      }
    }
  }
}

TEST_F(CudaExperts, RouterLeavesOutPaddingAsTheCpuDoes) {
  for (const RouterOptions& o : router_rules()) {
    const at::Tensor on_gpu = (random({517, 64}) * 2).requires_grad_();
    const at::Tensor on_cpu = on_gpu.detach().cpu().requires_grad_();
    const at::Tensor padding = at::rand({517}, generator_).lt(0.4);
    const Routing want = route(on_cpu, {}, o, {.padding = padding});
    const Routing chosen{
        .experts = want.experts.cuda(),
        .counts = want.counts.cuda()};
    const Routing got =
        route(on_gpu, {}, o, {.chosen = &chosen, .padding = padding.cuda()});
    const at::Tensor g = random({517, o.experts_per_token});
    got.weights.backward(g);
    want.weights.backward(g.cpu());
    EXPECT_LE(
        relative_error(on_gpu.grad().cpu(), on_cpu.grad()),
        kCudaTolerance);
    const Routing again =
        route(on_gpu.detach(), {}, o, {.padding = padding.cuda()});
    EXPECT_EQ(
        again.counts.sum().item<std::int64_t>(),
        (517 - padding.sum().item<std::int64_t>()) * o.experts_per_token);
  }
}

TEST_F(CudaExperts, TheLowestIndexWinsTiesAndNansChooseDifferentExperts) {
  for (const double value : {0.0, std::nan("")}) {
    const Routing routing = route(
        at::full({70, 40}, value, at::TensorOptions(at::kCUDA)),
        {},
        {.experts_per_token = 3});
    EXPECT_TRUE(at::equal(
        routing.experts.cpu(),
        at::arange(3, at::kInt).expand({70, 3})));
  }
}

TEST_F(CudaExperts, SortAndRowsMatchTheCpu) {
  std::mt19937_64 random_sizes(3);
  for (int i = 0; i < 24; ++i) {
    const std::int64_t tokens = i == 0 ? 1 : 1 + random_sizes() % 3000;
    const std::int64_t slots = 1 + random_sizes() % 8;
    const std::int64_t experts = i == 1 ? 1000 : 1 + random_sizes() % 130;
    const std::int64_t dim =
        i % 2 == 0 ? 8 * (1 + random_sizes() % 40) : 1 + random_sizes() % 200;
    SCOPED_TRACE(
        ::testing::Message() << tokens << ' ' << slots << ' ' << experts);
    // Every third case: all tokens to one expert.
    const at::Tensor choice =
        i % 3 == 2
            ? at::full({tokens, slots}, experts - 1, at::kInt)
            : at::randint(experts + 1, {tokens, slots}, generator_, at::kInt);
    const at::Tensor counts = at::bincount(choice.flatten(), {}, experts + 1)
                                  .narrow(0, 0, experts)
                                  .to(at::kInt);
    const Permutation want = sort_by_expert(choice, counts);
    const Permutation got = sort_by_expert(choice.cuda(), counts.cuda());
    EXPECT_TRUE(at::equal(got.order.cpu(), want.order));
    EXPECT_TRUE(at::equal(got.inverse.cpu(), want.inverse));
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = random({tokens, dim}, dtype);
      const at::Tensor rows = permute_rows(x, got);
      EXPECT_TRUE(at::equal(rows.cpu(), permute_rows(x.cpu(), want)));
      const at::Tensor a = random({tokens, dim}, dtype);
      const at::Tensor sum = sum_rows_of_tokens(rows, got, a);
      // Both add in float32 in the same order and round once.
      EXPECT_TRUE(
          at::equal(sum.cpu(), sum_rows_of_tokens(rows.cpu(), want, a.cpu())));
    }
  }
}

// Rows after the last end contain NaN, so a result that reads them is NaN.
TEST_F(CudaExperts, GroupedLayersMatchTheCpu) {
  struct Case {
    std::vector<std::int32_t> counts;
    std::int64_t behind;
    std::int64_t in;
    std::int64_t out;
  };
  const Case cases[] = {
      {{64, 64, 64, 64}, 0, 64, 128},
      {{0, 130, 0, 7, 1, 0}, 5, 64, 48},
      {{0, 0, 300, 0}, 0, 128, 64},
      {{1, 0}, 3, 16, 16},
      {{0, 0}, 4, 16, 16},
      {{5, 9, 2}, 0, 7, 13}};  // sizes that the kernel does not take
  for (const auto& [counts, behind, in, out] : cases) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      SCOPED_TRACE(::testing::Message() << counts.size() << ' ' << in);
      const at::Tensor ends = at::tensor(counts, at::kInt).cumsum(0, at::kInt);
      const std::int64_t kept = ends[-1].item<std::int64_t>();
      const std::int64_t rows = kept + behind;
      const auto num_experts = static_cast<std::int64_t>(counts.size());
      const auto spoiled = [&](at::Tensor t) {
        t.slice(0, kept).fill_(std::nan(""));
        return t;
      };
      const auto head = [&](const at::Tensor& t) {
        return t.slice(0, 0, kept).cpu();
      };
      const double tolerance =
          dtype == at::kBFloat16 ? 8 * epsilon(dtype) : kCudaTolerance;
      const auto expect_close =
          [&](const at::Tensor& got, const at::Tensor& want, const char* what) {
            if (want.numel() > 0) {
              EXPECT_LE(relative_error(got.cpu(), want), tolerance) << what;
            }
          };
      const at::Tensor x = spoiled(random({rows, in}, dtype)).requires_grad_();
      const at::Tensor w =
          random({num_experts, out, in}, dtype).requires_grad_();
      const at::Tensor g = spoiled(random({rows, out}, dtype));
      const auto exact = [](const at::Tensor& t) {
        return t.detach().cpu().to(at::kDouble).requires_grad_();
      };
      const at::Tensor xe = exact(x), we = exact(w);
      const at::Tensor y = grouped_linear(x, w, {ends.cuda()});
      const at::Tensor ye = grouped_linear(xe, we, {ends});
      expect_close(head(y), head(ye), "y");
      y.backward(g);
      ye.backward(exact(g).detach());
      expect_close(head(x.grad()), head(xe.grad()), "dx");
      expect_close(w.grad(), we.grad(), "dw");

      const at::Tensor gate_up =
          spoiled(random({rows, 2 * in}, dtype)).requires_grad_();
      const at::Tensor factors =
          at::rand({rows}, generator_).cuda().requires_grad_();
      w.mutable_grad() = at::Tensor();
      const at::Tensor s = grouped_gated_linear(
          GateActivation::silu,
          gate_up,
          factors,
          w,
          {ends.cuda()});
      const at::Tensor gate_up_cpu =
          gate_up.detach().cpu().to(at::kFloat).requires_grad_();
      const at::Tensor factors_cpu = factors.detach().cpu().requires_grad_();
      const at::Tensor w_cpu = w.detach().cpu().to(at::kFloat).requires_grad_();
      const at::Tensor sc = grouped_gated_linear(
          GateActivation::silu,
          gate_up_cpu,
          factors_cpu,
          w_cpu,
          {ends});
      expect_close(head(s), head(sc), "swiglu");
      s.backward(g);
      sc.backward(g.cpu().to(at::kFloat));
      expect_close(head(gate_up.grad()), head(gate_up_cpu.grad()), "dgate_up");
      expect_close(head(factors.grad()), head(factors_cpu.grad()), "dfactors");
      expect_close(w.grad(), w_cpu.grad(), "dw of swiglu");
    }
  }
}

// Runs `layer` on the GPU and, in float32, on the CPU. Returns the largest
// error of its result and of its inputs' gradients, relative to each. Rows of
// inputs with `rows` of them count up to `kept`; later rows contain NaN.
double error_of(
    const std::function<at::Tensor(const TensorList&, at::Device)>& layer,
    const TensorList& inputs,
    const at::Tensor& g,
    std::int64_t kept) {
  const std::int64_t rows = g.size(0);
  const auto spoiled = [&](const at::Tensor& t) {
    at::Tensor copy = t.clone();
    if (copy.size(0) == rows) {
      copy.slice(0, kept).fill_(std::nan(""));
    }
    return copy;
  };
  const auto run = [&](at::Device device, bool exact) {
    const auto moved = [&](const at::Tensor& t) {
      return spoiled(t).to(device, exact ? at::kFloat : t.scalar_type());
    };
    TensorList leaves;
    for (const at::Tensor& input : inputs) {
      leaves.push_back(moved(input).requires_grad_());
    }
    const at::Tensor y = layer(leaves, device);
    y.backward(moved(g));
    TensorList results{y.detach()};
    for (const at::Tensor& leaf : leaves) {
      results.push_back(leaf.grad());
    }
    for (at::Tensor& result : results) {
      result = result.cpu();
      result = result.size(0) == rows ? result.slice(0, 0, kept) : result;
    }
    return results;
  };
  const TensorList got = run(at::kCUDA, /*exact=*/false);
  const TensorList want = run(at::kCPU, /*exact=*/true);
  double error = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double this_error = relative_error(got[i], want[i]);
    EXPECT_FALSE(std::isnan(this_error)) << i;
    error = std::max(error, this_error);
  }
  return error;
}

constexpr std::int64_t kBiasedRows = 175;
constexpr std::int64_t kKeptRows = 170;

// Three experts, of which the second has no rows.
at::Tensor biased_ends(std::int64_t per_expert) {
  return per_expert == 1 ? at::tensor({40, 40, 170}, at::kInt)
                         : at::tensor({7, 40, 40, 40, 170, 170}, at::kInt);
}

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 8 * epsilon(dtype) : kCudaTolerance;
}

// In sizes that the grouped matmul kernel supports, and in others.
TEST_F(CudaExperts, LayersWithBiasesMatchTheCpu) {
  for (const auto& [in, out] : {std::pair{64, 48}, std::pair{12, 7}}) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      for (const std::int64_t per_expert : {1, 2}) {
        SCOPED_TRACE(::testing::Message() << in << ' ' << dtype);
        const double error = error_of(
            [&](const TensorList& t, at::Device device) {
              return grouped_linear(
                  t[0],
                  {t[1], t[2], ExpertLayout::interleaved},
                  {biased_ends(per_expert).to(device), per_expert});
            },
            {random({kBiasedRows, in}, dtype),
             random({3, in, out}, dtype),
             random({3, out}, dtype)},
            random({kBiasedRows, out}, dtype),
            kKeptRows);
        EXPECT_LE(error, tolerance_of(dtype));
      }
    }
  }
}

// Both sides get the same gate and up, many beyond the limits of clamped_silu,
// so that rounding moves none across a limit.
TEST_F(CudaExperts, GatesMatchTheCpu) {
  struct Case {
    GateActivation activation;
    ExpertLayout layout;
  };
  const Case cases[] = {
      {GateActivation::silu, ExpertLayout::stacked},
      {GateActivation::silu, ExpertLayout::interleaved},
      {GateActivation::clamped_silu, ExpertLayout::stacked},
      {GateActivation::clamped_silu, ExpertLayout::interleaved},
      {GateActivation::gelu_tanh, ExpertLayout::interleaved}};
  for (const auto& [activation, layout] : cases) {
    for (const auto& [width, dim] : {std::pair{32, 64}, std::pair{7, 12}}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
        const std::int64_t per_expert = width == 7 ? 2 : 1;
        SCOPED_TRACE(
            ::testing::Message()
            << static_cast<int>(activation) << ' ' << static_cast<int>(layout)
            << ' ' << width << ' ' << dtype);
        const bool in_out = layout == ExpertLayout::interleaved;
        at::Tensor gate_up = random({kBiasedRows, 2 * width}, dtype) * 5;
        gate_up[0].fill_(7.0);
        gate_up[1].fill_(-7.0);
        const double error = error_of(
            [&,
             a = activation,
             l = layout](const TensorList& t, at::Device device) {
              return grouped_gated_linear(
                  a,
                  t[0],
                  t[1],
                  {t[2], t[3], l},
                  {biased_ends(per_expert).to(device), per_expert});
            },
            {gate_up,
             at::rand({kBiasedRows}, generator_).cuda(),
             in_out ? random({3, width, dim}, dtype)
                    : random({3, dim, width}, dtype),
             random({3, dim}, dtype)},
            random({kBiasedRows, dim}, dtype),
            kKeptRows);
        EXPECT_LE(error, tolerance_of(dtype));
      }
    }
  }
}

// A comparison that loses NaN would hide a diverged run.
TEST_F(CudaExperts, ClampsKeepNan) {
  const at::Tensor ends = at::tensor({1}, at::kInt).cuda();
  for (const std::int64_t spoiled : {0, 1}) {  // the gate, the up
    at::Tensor gate_up = at::ones({1, 16}, at::kCUDA);
    gate_up[0][spoiled] = std::nan("");
    const at::Tensor y = grouped_gated_linear(
        GateActivation::clamped_silu,
        gate_up.requires_grad_(),
        at::ones({1}, at::kCUDA),
        {at::ones({1, 8, 8}, at::kCUDA), {}, ExpertLayout::interleaved},
        {ends});
    EXPECT_TRUE(y.isnan().all().item<bool>());
    y.sum().backward();
    EXPECT_TRUE(gate_up.grad()[0][0].isnan().item<bool>());
    EXPECT_FALSE(gate_up.grad()[0][2].isnan().item<bool>());
  }
}

TEST_F(CudaExperts, WeightGradientsGoStraightIntoTheSink) {
  const at::Tensor ends = at::tensor({40, 40, 100}, at::kInt).cuda();
  const at::Tensor x = random({100, 64}, at::kBFloat16);
  const at::Tensor g = random({100, 32}, at::kBFloat16);
  const at::Tensor w = random({3, 32, 64}, at::kBFloat16).requires_grad_();
  grouped_linear(x, w, {ends}).backward(g);
  const at::Tensor plain = w.grad();
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    const auto sink = std::make_shared<FakeSink>(dtype);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    grouped_linear(x, w, {ends}, context).backward(g);
    // Also where an expert has no rows and its gradient buffer contained NaN.
    EXPECT_TRUE(at::equal(sink->grad(w).to(at::kBFloat16), plain));
    grouped_linear(x, w, {ends}, context).backward(g);
    EXPECT_LE(
        relative_error(sink->grad(w).cpu(), plain.cpu().to(at::kDouble) * 2),
        4 * epsilon(at::kBFloat16));
  }
}

// Multiples of the tiles of the kernels for sm_90a. Two experts have no rows,
// others less or more than a tile, and rows after the last end are NaN.
class CudaGroupedProducts : public CudaExperts {
 protected:
  static constexpr std::int64_t kOut = 512;
  static constexpr std::int64_t kIn = 768;

  // Enough tiles for several turns of each block, also of experts without rows.
  static std::vector<int> many_experts() {
    std::vector<int> ends;
    int end = 0;
    for (int e = 0; e < 60; ++e) {
      end += e % 7 == 3 ? 0 : e * 37 % 401;
      ends.push_back(end);
    }
    return ends;
  }
  void use(const std::vector<int>& ends) {
    groups_.ends = at::tensor(ends, at::kInt).cuda();
    num_rows_ = ends.back();
  }
  std::int64_t num_experts() const { return groups_.ends.numel(); }
  at::Tensor rows(std::int64_t columns) {
    at::Tensor rows = random({num_rows_ + 60, columns}, at::kBFloat16);
    rows.slice(0, num_rows_).fill_(NAN);
    return rows;
  }
  // Calls fn(expert, first row, end) for each expert.
  void for_each_expert(
      const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& fn) {
    const at::Tensor ends = groups_.ends.cpu();
    for (std::int64_t e = 0; e < ends.numel(); ++e) {
      fn(e,
         e == 0 ? 0 : ends[e - 1].item<std::int64_t>(),
         ends[e].item<std::int64_t>());
    }
  }
  // Returns rows[r] matrices[e] in float64.
  at::Tensor exact(const at::Tensor& rows, const at::Tensor& matrices) {
    at::Tensor y = at::empty({num_rows_, matrices.size(2)}, at::kDouble);
    for_each_expert([&](auto e, auto begin, auto end) {
      y.slice(0, begin, end)
          .copy_(rows.slice(0, begin, end)
                     .cpu()
                     .to(at::kDouble)
                     .mm(matrices[e].cpu().to(at::kDouble)));
    });
    return y;
  }

  // Experts with few rows, and with 2048 or more: the kernel of weight
  // gradients divides its work in another way.
  const std::vector<std::vector<int>> cases_{
      {70, 70, 71, 199, 532, 532},
      many_experts(),
      {2101, 4230}};
  Groups groups_;
  std::int64_t num_rows_ = 0;
};

TEST_F(CudaGroupedProducts, RowsMatchFloat64) {
  for (const std::vector<int>& ends : cases_) {
    use(ends);
    const at::Tensor w = random({num_experts(), kOut, kIn}, at::kBFloat16);
    const at::Tensor x = rows(kIn);
    const at::Tensor g = rows(kOut);
    const auto check = [&](const at::Tensor& y, const at::Tensor& want) {
      EXPECT_LE(
          relative_error(y.slice(0, 0, num_rows_).cpu(), want),
          4 * epsilon(at::kBFloat16));
    };
    const at::Tensor y = grouped_forward(x, w, groups_);
    check(y, exact(x, w.transpose(1, 2)));
    check(grouped_input_gradient(g, w, groups_), exact(g, w));
    EXPECT_TRUE(at::equal(
        grouped_forward(x, w, groups_).slice(0, 0, num_rows_),
        y.slice(0, 0, num_rows_)));
  }
}

TEST_F(CudaGroupedProducts, WeightGradientsMatchFloat64) {
  for (const std::vector<int>& ends : cases_) {
    use(ends);
    const at::Tensor x = rows(kIn);
    const at::Tensor g = rows(kOut);
    at::Tensor want = at::empty({num_experts(), kOut, kIn}, at::kDouble);
    for_each_expert([&](auto e, auto begin, auto end) {
      const auto rows = [&](const at::Tensor& t) {
        return t.slice(0, begin, end).cpu().to(at::kDouble);
      };
      want[e].copy_(rows(g).t().mm(rows(x)));
    });
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      at::Tensor grad = at::full(
          want.sizes(),
          NAN,
          at::TensorOptions(at::kCUDA).dtype(dtype));
      grouped_weight_gradient(grad, false, g, x, groups_);
      // torch's kernel rounds to bfloat16 first.
      const bool is_exact =
          dtype == at::kFloat && adds_to_float32(grad, g, x, groups_);
      const double tolerance =
          is_exact ? kCudaTolerance : 4 * epsilon(at::kBFloat16);
      EXPECT_LE(relative_error(grad.cpu(), want), tolerance) << dtype;
      const at::Tensor once = grad.clone();
      grouped_weight_gradient(grad, true, g, x, groups_);
      EXPECT_LE(relative_error(grad.cpu(), want * 2), tolerance) << dtype;
      at::Tensor again = at::empty_like(once);
      grouped_weight_gradient(again, false, g, x, groups_);
      EXPECT_TRUE(at::equal(again, once)) << dtype;
    }
  }
}

}  // namespace
}  // namespace flatshard::nn
