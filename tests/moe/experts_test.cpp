#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/grouped_matmul.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/token_exchange.h"
#include "flatshard/nn/linear.h"
#include "router_oracle.h"
#include "tests/nn/check.h"
#include "tests/support/message_of.h"
#include "tests/support/sum_order.h"

#include <random>

// Permutation, exchange and grouped matmuls, on the CPU.
namespace flatshard::nn {
namespace {

using flatshard::testing::message_of;
using ::testing::HasSubstr;

at::Tensor int_tensor(std::vector<std::int32_t> values) {
  return at::tensor(values, at::kInt);
}

// Random experts, or all of them one; `dropped` stands for none.
struct Choice {
  at::Tensor experts;
  at::Tensor counts;
};
Choice random_choice(
    std::int64_t tokens,
    std::int64_t slots,
    std::int64_t num_experts,
    bool drops,
    std::uint64_t seed) {
  const at::Tensor experts = at::randint(
      num_experts + (drops ? 1 : 0),
      {tokens, slots},
      seeded(seed),
      at::kInt);
  return {
      experts,
      at::bincount(experts.flatten(), {}, num_experts + 1)
          .narrow(0, 0, num_experts)
          .to(at::kInt)};
}

TEST(Permutations, AreStableSortsWithDroppedPairsLast) {
  for (const bool drops : {false, true}) {
    const auto [experts, counts] = random_choice(50, 3, 7, drops, 1);
    const Permutation p = sort_by_expert(experts, counts);
    const at::Tensor want =
        std::get<1>(at::sort(experts.flatten(), /*stable=*/true, 0, false));
    EXPECT_TRUE(at::equal(p.order.to(at::kLong), want));
    const at::Tensor rows = at::empty({150}, at::kInt);
    rows.index_copy_(0, want, at::arange(150, at::kInt));
    EXPECT_TRUE(at::equal(
        p.inverse.flatten(),
        rows.masked_fill(experts.flatten().eq(7), -1)));
  }
  const Permutation none =
      sort_by_expert(at::empty({0, 2}, at::kInt), at::zeros({3}, at::kInt));
  EXPECT_EQ(none.rows(), 0);
}

TEST(Permutations, OfWhatAnotherRouterChose) {
  const auto [experts, counts] = random_choice(50, 3, 7, false, 1);
  const ExpertOrder order = order_by_expert(experts.to(at::kLong), 7);
  const Permutation want = sort_by_expert(experts, counts);
  EXPECT_TRUE(at::equal(order.counts, counts));
  EXPECT_TRUE(at::equal(order.permutation.order, want.order));
  EXPECT_TRUE(at::equal(order.permutation.inverse, want.inverse));
  EXPECT_FALSE(order.permutation.drops);
  EXPECT_THAT(
      message_of([&] { order_by_expert(experts, 5); }),
      HasSubstr("expected experts below 5, got 6"));
  EXPECT_THAT(
      message_of([&] { order_by_expert(experts.to(at::kFloat), 7); }),
      HasSubstr("expected integers [tokens, slots], got Float [50, 3]"));
}

TEST(Permutations, M3_RowsAndSumsAreEachOthersGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto [experts, counts] = random_choice(20, 3, 5, true, 2);
    const Permutation p = sort_by_expert(experts, counts);
    const std::int64_t kept = counts.sum().item<std::int64_t>();
    const at::Tensor x =
        at::randn({20, 6}, seeded(3)).to(dtype).requires_grad_();
    const at::Tensor rows = permute_rows(x, p);
    for (std::int64_t r = 0; r < kept; ++r) {
      EXPECT_TRUE(at::equal(rows[r], x[p.order[r].item<std::int64_t>() / 3]));
    }
    at::Tensor g = at::randn({60, 6}, seeded(4)).to(dtype);
    // The gradient of rows that were dropped must not be read.
    g.slice(0, kept).fill_(std::nan(""));
    rows.backward(g);
    const at::Tensor sum = sum_rows_of_tokens(g, p);
    EXPECT_TRUE(at::equal(x.grad(), sum));
    const at::Tensor clean = g.to(at::kDouble).nan_to_num(0.0);
    at::Tensor want = at::zeros({20, 6}, at::kDouble);
    want.index_add_(0, at::div(p.order, 3, "floor"), clean);
    EXPECT_LE(relative_error(sum, want), 4 * epsilon(dtype));

    const at::Tensor a =
        at::randn({20, 6}, seeded(5)).to(dtype).requires_grad_();
    const at::Tensor leaf = g.clone().requires_grad_();
    const at::Tensor all = sum_rows_of_tokens(leaf, p, a);
    EXPECT_LE(
        relative_error(all, want + a.to(at::kDouble)),
        4 * epsilon(dtype));
    const at::Tensor dy = at::randn({20, 6}, seeded(7)).to(dtype);
    all.backward(dy);
    EXPECT_TRUE(at::equal(a.grad(), dy));
    EXPECT_TRUE(at::equal(leaf.grad(), permute_rows(dy, p)));
  }
}

TEST(Permutations, ADroppedPairsWeightHasNoGradient) {
  const at::Tensor experts = int_tensor({1, 2, 0, 2}).view({2, 2});
  const Permutation p = sort_by_expert(experts, int_tensor({1, 1}));
  const at::Tensor weights =
      at::tensor({1.F, 2.F, 3.F, 4.F}).view({2, 2}).requires_grad_();
  const at::Tensor rows = permute_weights(weights, p);
  EXPECT_TRUE(at::equal(rows, at::tensor({3.F, 1.F, 2.F, 4.F})));
  rows.backward(at::tensor({10.F, 20.F, std::nanf(""), std::nanf("")}));
  EXPECT_TRUE(at::equal(
      weights.grad(),
      at::tensor({20.F, 0.F, 10.F, 0.F}).view({2, 2})));
}

// A batch of sequences keeps its shape.
TEST(Permutations, SumsHaveTheShapeOfTheFirstAddend) {
  const at::Tensor experts = int_tensor({1, 0, 0, 1, 2, 0, 1, 2}).view({4, 2});
  const Permutation p = sort_by_expert(experts, int_tensor({3, 3, 2}));
  const at::Tensor rows = at::randn({8, 3}, seeded(5));
  const at::Tensor flat = at::randn({4, 3}, seeded(6)).requires_grad_();
  const at::Tensor batch =
      flat.detach().view({2, 2, 3}).clone().requires_grad_();
  const at::Tensor a = rows.clone().requires_grad_();
  const at::Tensor b = rows.clone().requires_grad_();
  const at::Tensor got = sum_rows_of_tokens(a, p, batch);
  const at::Tensor want = sum_rows_of_tokens(b, p, flat);
  EXPECT_EQ(got.sizes(), batch.sizes());
  EXPECT_TRUE(at::equal(got.view({4, 3}), want));
  const at::Tensor dy = at::randn({4, 3}, seeded(8));
  got.backward(dy.view({2, 2, 3}));
  want.backward(dy);
  EXPECT_TRUE(at::equal(a.grad(), b.grad()));
  EXPECT_TRUE(at::equal(batch.grad().view({4, 3}), flat.grad()));
  EXPECT_THROW(sum_rows_of_tokens(rows, p, at::zeros({3, 4})), Error);
}

// Where no pair was dropped, the short way gives the same gradient.
TEST(Permutations, WeightsOfPairsThatAllHaveRows) {
  const at::Tensor experts = int_tensor({1, 0, 0, 1, 2, 0}).view({3, 2});
  Permutation p = sort_by_expert(experts, int_tensor({3, 2, 1}));
  const at::Tensor dy = at::randn({6}, seeded(9));
  std::vector<at::Tensor> gradients;
  for (const bool drops : {true, false}) {
    p.drops = drops;
    const at::Tensor weights = at::randn({3, 2}, seeded(8)).requires_grad_();
    permute_weights(weights, p).backward(dy);
    gradients.push_back(weights.grad());
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  EXPECT_TRUE(at::equal(permute_weights(gradients[1], p), dy));
}

// Counts of groups: balanced, some empty, all in one, one row, with rows after
// the last end.
struct Rows {
  const char* name;
  std::vector<std::int32_t> ends;
  std::int64_t rows;
};

class Grouped : public ::testing::TestWithParam<Rows> {
 protected:
  // A weight's matrices start at multiples of 64 bytes: the summation order of
  // a matmul depends on that.
  static constexpr std::int64_t kIn = 8;
  static constexpr std::int64_t kOut = 6;
  std::int64_t num_experts() const {
    return static_cast<std::int64_t>(GetParam().ends.size());
  }
  Groups groups() const { return {int_tensor(GetParam().ends)}; }
  std::int64_t kept() const { return GetParam().ends.back(); }
  at::Tensor rows(std::int64_t width, std::uint64_t seed) const {
    at::Tensor x = at::randn({GetParam().rows, width}, seeded(seed));
    x.slice(0, kept()).fill_(std::nan(""));
    return x;
  }
  at::Tensor weight(std::int64_t out, std::int64_t in) const {
    return at::randn({num_experts(), out, in}, seeded(9)).requires_grad_();
  }
};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    Grouped,
    ::testing::Values(
        Rows{"Balanced", {4, 8, 12}, 12},
        Rows{"Empty", {0, 5, 5, 9, 9}, 9},
        Rows{"AllInOne", {0, 0, 11, 11}, 11},
        Rows{"OneRow", {0, 1, 1}, 1},
        Rows{"RowsBehind", {3, 3, 7}, 12},
        Rows{"NoRows", {0, 0}, 0},
        Rows{"AllBehind", {0, 0}, 4}),
    [](const auto& info) { return info.param.name; });

/// Returns the tolerance of two layers of at most 8 inputs and 12 rows with a
/// gate, forward and backward. Of one row a result may be one number, of which
/// the partial sums are some times larger.
double layers_tolerance() {
  return testing::sum_tolerance({.addends = 12, .in_a_row = 2 * 3, .size = 4});
}

// Returns the loop of layers that a grouped one replaces.
at::Tensor
loop(const at::Tensor& x, const at::Tensor& w, const Groups& groups) {
  std::vector<at::Tensor> parts;
  for_each_group(
      groups,
      [&](std::int64_t e, bool, std::int64_t begin, std::int64_t end) {
        parts.push_back(nn::linear(x.slice(0, begin, end), w[e]));
      });
  return at::cat(parts);
}

// On CPUs the grouped layer is such a loop itself: the same kernels.
TEST_P(Grouped, LinearIsTheLoopOfProductsBitForBit) {
  const at::Tensor x = rows(kIn, 1).requires_grad_();
  const at::Tensor w = weight(kOut, kIn);
  const at::Tensor y = grouped_linear(x, w, groups());
  const at::Tensor xl = x.detach().clone().requires_grad_();
  const at::Tensor wl = w.detach().clone().requires_grad_();
  const at::Tensor want = loop(xl, wl, groups());
  EXPECT_TRUE(at::equal(y.slice(0, 0, kept()), want));
  at::Tensor g = rows(kOut, 2);
  y.backward(g);
  want.backward(g.slice(0, 0, kept()));
  EXPECT_TRUE(
      at::equal(x.grad().slice(0, 0, kept()), xl.grad().slice(0, 0, kept())));
  EXPECT_TRUE(at::equal(w.grad(), wl.grad()));
}

TEST_P(Grouped, M5_WeightGradientsGoStraightIntoTheSink) {
  const at::Tensor x = rows(kIn, 1), g = rows(kOut, 2);
  const at::Tensor w = weight(kOut, kIn);
  grouped_linear(x, w, groups()).backward(g);
  const at::Tensor plain = w.grad();
  w.mutable_grad() = at::Tensor();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const auto sink = std::make_shared<FakeSink>(dtype);
    const auto context = c10::make_intrusive<ModuleContext>();
    context->wgrad_sink = sink;
    grouped_linear(x, w, groups(), context).backward(g);
    EXPECT_FALSE(w.grad().defined());
    EXPECT_TRUE(at::equal(sink->grad(w).to(at::kFloat), plain));
    grouped_linear(x, w, groups(), context).backward(g);
    EXPECT_LE(relative_error(sink->grad(w), plain * 2), 8 * 0x1p-24);
    EXPECT_TRUE(sink->balanced());
  }
}

TEST_P(Grouped, SwigluLinearMatchesItsParts) {
  const at::Tensor gate_up = rows(2 * kIn, 1).requires_grad_();
  const at::Tensor w = weight(kOut, kIn);
  at::Tensor factors = at::rand({GetParam().rows}, seeded(4));
  factors.requires_grad_();
  const at::Tensor y =
      grouped_gated_linear(GateActivation::silu, gate_up, factors, w, groups());
  const auto exact = [](const at::Tensor& t) {
    return t.detach().to(at::kDouble).requires_grad_();
  };
  const at::Tensor ge = exact(gate_up), fe = exact(factors), we = exact(w);
  const auto halves = ge.chunk(2, 1);
  const at::Tensor product = at::silu(halves[0]) * halves[1] * fe.unsqueeze(1);
  const at::Tensor want = loop(product, we, groups());
  const double tolerance = layers_tolerance();
  const auto head = [&](const at::Tensor& t) { return t.slice(0, 0, kept()); };
  if (kept() > 0) {
    EXPECT_LE(relative_error(head(y), want), tolerance);
  }
  const at::Tensor g = rows(kOut, 2);
  y.backward(g);
  want.backward(head(g).to(at::kDouble));
  if (kept() > 0) {
    EXPECT_LE(relative_error(head(gate_up.grad()), head(ge.grad())), tolerance);
    EXPECT_LE(relative_error(head(factors.grad()), head(fe.grad())), tolerance);
  }
  EXPECT_LE(relative_error(w.grad(), we.grad()), tolerance);
}

// Both layouts, with biases and with the gate that has limits.
TEST_P(Grouped, LayersWithBiasesMatchTheirParts) {
  const double tolerance = layers_tolerance();
  const auto head = [&](const at::Tensor& t) { return t.slice(0, 0, kept()); };
  const auto exact = [](const at::Tensor& t) {
    return t.detach().to(at::kDouble).requires_grad_();
  };
  for (const auto layout : {ExpertLayout::stacked, ExpertLayout::interleaved}) {
    const bool in_turn = layout == ExpertLayout::interleaved;
    SCOPED_TRACE(in_turn);
    const std::int64_t width = 4;
    const auto weight_of = [&](std::int64_t out, std::int64_t in) {
      return in_turn ? weight(in, out) : weight(out, in);
    };
    const at::Tensor x = rows(kIn, 1).requires_grad_();
    const at::Tensor up = weight_of(2 * width, kIn);
    const at::Tensor down = weight_of(kOut, width);
    const at::Tensor up_bias =
        at::randn({num_experts(), 2 * width}, seeded(5)).requires_grad_();
    const at::Tensor down_bias =
        at::randn({num_experts(), kOut}, seeded(6)).requires_grad_();
    at::Tensor factors = at::rand({GetParam().rows}, seeded(4));
    factors.requires_grad_();
    const at::Tensor y = grouped_gated_linear(
        GateActivation::clamped_silu,
        grouped_linear(x, {up, up_bias, layout}, groups()),
        factors,
        {down, down_bias, layout},
        groups());
    const TensorList leaves{x, up, up_bias, factors, down, down_bias};
    TensorList e;
    for (const at::Tensor& leaf : leaves) {
      e.push_back(exact(leaf));
    }
    std::vector<at::Tensor> parts;
    for_each_group(
        groups(),
        [&](std::int64_t i, bool, std::int64_t begin, std::int64_t end) {
          const auto matrix = [&](const at::Tensor& w) {
            return in_turn ? w[i].t() : w[i];
          };
          const at::Tensor both =
              at::linear(e[0].slice(0, begin, end), matrix(e[1]), e[2][i]);
          const at::Tensor gate = (in_turn ? both.slice(1, 0, 2 * width, 2)
                                           : both.narrow(1, 0, width))
                                      .clamp_max(7);
          const at::Tensor linear = in_turn ? both.slice(1, 1, 2 * width, 2)
                                            : both.narrow(1, width, width);
          const at::Tensor product =
              gate * (1.702 * gate).sigmoid() * (linear.clamp(-7, 7) + 1);
          parts.push_back(
              at::linear(product, matrix(e[4]), e[5][i]) *
              e[3].slice(0, begin, end).unsqueeze(1));
        });
    const at::Tensor want = at::cat(parts);
    const at::Tensor g = rows(kOut, 2);
    y.backward(g);
    want.backward(head(g).to(at::kDouble));
    if (kept() > 0) {
      EXPECT_LE(relative_error(head(y), want), tolerance);
      for (const std::size_t i : {0U, 3U}) {
        EXPECT_LE(
            relative_error(head(leaves[i].grad()), head(e[i].grad())),
            tolerance)
            << i;
      }
    }
    for (const std::size_t i : {1U, 2U, 4U, 5U}) {
      EXPECT_LE(relative_error(leaves[i].grad(), e[i].grad()), tolerance) << i;
    }
  }
}

TEST(GroupedLinears, PermutingInsideIsPermutingBefore) {
  const auto [experts, counts] = random_choice(15, 2, 4, true, 5);
  const Permutation p = sort_by_expert(experts, counts);
  const Groups groups{counts.cumsum(0, at::kInt)};
  const at::Tensor w = at::randn({4, 3, 5}, seeded(6)).requires_grad_();
  const at::Tensor x = at::randn({15, 5}, seeded(7)).requires_grad_();
  const at::Tensor g = at::randn({30, 3}, seeded(8));
  const std::int64_t kept = counts.sum().item<std::int64_t>();
  std::vector<std::vector<at::Tensor>> runs;
  for (const bool inside : {false, true}) {
    x.mutable_grad() = at::Tensor();
    w.mutable_grad() = at::Tensor();
    const at::Tensor y = inside ? permute_grouped_linear(x, p, w, groups)
                                : grouped_linear(permute_rows(x, p), w, groups);
    y.backward(g);
    runs.push_back({y.detach().slice(0, 0, kept), x.grad(), w.grad()});
  }
  for (std::size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
  }
}

TEST(GroupedLinears, GroupsOfOneExpertAreProductsOfTheirOwn) {
  // Two experts with two groups each, of which one is empty.
  const Groups groups{int_tensor({2, 5, 5, 9}), 2};
  const at::Tensor x = at::randn({9, 4}, seeded(1));
  const at::Tensor w = at::randn({2, 3, 4}, seeded(2)).requires_grad_();
  const at::Tensor g = at::randn({9, 3}, seeded(3));
  grouped_linear(x, w, groups).backward(g);
  at::Tensor first = at::mm(g.slice(0, 0, 2).t(), x.slice(0, 0, 2));
  first.add_(at::mm(g.slice(0, 2, 5).t(), x.slice(0, 2, 5)));
  EXPECT_TRUE(at::equal(w.grad()[0], first));
  at::Tensor second = at::zeros({3, 4});
  second.addmm_(g.slice(0, 5, 9).t(), x.slice(0, 5, 9));
  EXPECT_TRUE(at::equal(w.grad()[1], second));
}

// With this number of rows, addmm would add the second matmul in pieces.
TEST(GroupedLinears, M11_GroupsOfManyRowsAddUpAsRanksDo) {
  constexpr std::int64_t kRows = 700;
  const Groups groups{int_tensor({kRows, 2 * kRows}), 2};
  const at::Tensor x = at::randn({2 * kRows, 192}, seeded(1));
  const at::Tensor w = at::randn({1, 96, 192}, seeded(2)).requires_grad_();
  const at::Tensor g = at::randn({2 * kRows, 96}, seeded(3));
  grouped_linear(x, w, groups).backward(g);
  const auto product = [&](std::int64_t begin) {
    return at::mm(
        g.slice(0, begin, begin + kRows).t(),
        x.slice(0, begin, begin + kRows));
  };
  EXPECT_TRUE(at::equal(w.grad()[0], product(0) + product(kRows)));
}

TEST(GroupedLinears, AThousandExperts) {
  const auto [experts, counts] = random_choice(300, 2, 1000, false, 3);
  const Permutation p = sort_by_expert(experts, counts);
  const Groups groups{counts.cumsum(0, at::kInt)};
  const at::Tensor w = at::randn({1000, 2, 4}, seeded(4));
  const at::Tensor x = at::randn({300, 4}, seeded(5));
  const at::Tensor y =
      sum_rows_of_tokens(permute_grouped_linear(x, p, w, groups), p);
  const at::Tensor mine =
      w.index_select(0, experts.flatten()).view({300, 2, 2, 4}).to(at::kDouble);
  const at::Tensor want =
      at::matmul(mine, x.to(at::kDouble).view({300, 1, 4, 1}))
          .squeeze(-1)
          .sum(1);
  EXPECT_LE(relative_error(y, want), 16 * 0x1p-24);
}

TEST(GroupedLinears, RefuseWhatDoesNotFit) {
  const Groups groups{int_tensor({1, 2})};
  const at::Tensor w = at::zeros({2, 3, 4});
  const auto message = [](auto&& run) {
    try {
      run();
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("nothing");
  };
  EXPECT_EQ(
      message([&] {
        grouped_linear(at::zeros({2, 5}), w, groups);
      }),
      "grouped_linear: expected rows [rows, 4] for a weight [experts, out, in] "
      "of [2, 3, 4], got [2, 5]");
  EXPECT_EQ(
      message([&] {
        grouped_linear(at::zeros({2, 4}), w, {int_tensor({1, 2, 2})});
      }),
      "grouped_linear: expected int32 ends of 2 experts * 1 groups, got Int "
      "[3]");
  EXPECT_EQ(
      message([&] {
        grouped_gated_linear(
            GateActivation::silu,
            at::zeros({2, 8}),
            at::zeros({3}),
            w,
            groups);
      }),
      "grouped_gated_linear: expected float32 weights of 2 rows, got Float "
      "[3]");
}

// Rows that arrive in the reverse order, as if other ranks had sent them.
class ReversingExchange : public TokenExchange {
 public:
  ExchangePlanPtr begin_plan(const at::Tensor& counts, std::int64_t num_rows)
      override {
    ++plans;
    return LocalExchange().plan(counts, num_rows);
  }
  std::unique_ptr<RowTransfer> start(
      const ExchangePlanPtr& plan,
      Direction direction,
      const TransferInput& input) override {
    directions.push_back(direction);
    TensorList reversed;
    for (const at::Tensor& tensor : rows_of(direction, input)) {
      reversed.push_back(tensor.defined() ? tensor.flip(0) : tensor);
    }
    return LocalExchange().start(
        plan,
        direction,
        {.rows = result_of(direction, input, reversed)});
  }
  int plans = 0;
  std::vector<Direction> directions;
};

TEST(TokenExchanges, AGradientGoesTheOtherWay) {
  using Direction = TokenExchange::Direction;
  const auto exchange = std::make_shared<ReversingExchange>();
  const ExchangePlanPtr plan = exchange->plan(int_tensor({1, 2}), 3);
  EXPECT_TRUE(at::equal(plan->ends, int_tensor({1, 3})));
  const at::Tensor x = at::randn({3, 2}, seeded(1)).requires_grad_();
  const at::Tensor y =
      exchange_rows({exchange, plan, Direction::dispatch}, {x})[0];
  EXPECT_TRUE(at::equal(y, x.flip(0)));
  const at::Tensor g = at::randn({3, 2}, seeded(2));
  y.backward(g);
  EXPECT_TRUE(at::equal(x.grad(), g.flip(0)));
  EXPECT_THAT(
      exchange->directions,
      ::testing::ElementsAre(Direction::dispatch, Direction::combine));
}

TEST(TokenExchanges, TensorsTravelTogetherAndSoDoTheirGradients) {
  using Direction = TokenExchange::Direction;
  const auto exchange = std::make_shared<ReversingExchange>();
  const ExchangePlanPtr plan = exchange->plan(int_tensor({1, 2}), 3);
  const at::Tensor x = at::randn({3, 2}, seeded(1)).requires_grad_();
  const at::Tensor w = at::randn({3}, seeded(2)).requires_grad_();
  const TensorList y =
      exchange_rows({exchange, plan, Direction::dispatch}, {x, w});
  EXPECT_TRUE(at::equal(y[0], x.flip(0)));
  EXPECT_TRUE(at::equal(y[1], w.flip(0)));
  const at::Tensor g = at::randn({3, 2}, seeded(3));
  const at::Tensor h = at::randn({3}, seeded(4));
  torch::autograd::backward({y[0], y[1]}, {g, h}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(x.grad(), g.flip(0)));
  EXPECT_TRUE(at::equal(w.grad(), h.flip(0)));
  EXPECT_THAT(
      exchange->directions,
      ::testing::ElementsAre(Direction::dispatch, Direction::combine));
  // One without a gradient does not get one of zeros.
  w.mutable_grad() = at::Tensor();
  y[0].backward(g);
  EXPECT_FALSE(w.grad().defined());
}

TEST(TokenExchanges, TokensTravelAsTheirRows) {
  const auto reversing = std::make_shared<ReversingExchange>();
  const auto local = std::make_shared<LocalExchange>();
  using Exchange = std::shared_ptr<TokenExchange>;
  using Direction = TokenExchange::Direction;
  for (const Exchange& exchange : {Exchange(reversing), Exchange(local)}) {
    const Permutation permutation = sort_by_expert(
        int_tensor({1, 0, 0, 1}).view({2, 2}),
        int_tensor({2, 2}));
    const ExchangePlanPtr plan = exchange->plan(int_tensor({2, 2}), 4);
    std::vector<TensorList> results;
    for (const bool of_tokens : {false, true}) {
      const at::Tensor x = at::randn({2, 3}, seeded(1)).requires_grad_();
      const at::Tensor w = at::randn({4}, seeded(2)).requires_grad_();
      const at::Tensor first = at::randn({1, 2, 3}, seeded(3)).requires_grad_();
      const TensorList rows =
          of_tokens ? exchange_rows(
                          {exchange, plan, Direction::dispatch, permutation},
                          {x, w})
                    : exchange_rows(
                          {exchange, plan, Direction::dispatch},
                          {permute_rows(x, permutation), w});
      const at::Tensor y = rows[0].sin() * rows[1].unsqueeze(1);
      const at::Tensor sum =
          of_tokens
              ? exchange_rows(
                    {exchange, plan, Direction::combine, permutation},
                    {y},
                    first)[0]
              : sum_rows_of_tokens(
                    exchange_rows({exchange, plan, Direction::combine}, {y})[0],
                    permutation,
                    first);
      sum.backward(at::randn({1, 2, 3}, seeded(4)));
      results.push_back({rows[0], sum, x.grad(), w.grad(), first.grad()});
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
    }
  }
}

TEST(TokenExchanges, TheLocalOneLeavesRowsWhereTheyAre) {
  const auto exchange = std::make_shared<LocalExchange>();
  const ExchangePlanPtr plan = exchange->plan(int_tensor({2, 0, 1}), 4);
  EXPECT_TRUE(at::equal(plan->ends, int_tensor({2, 2, 3})));
  EXPECT_EQ(plan->num_received, 4);
  const at::Tensor x = at::randn({4, 2}).requires_grad_();
  const at::Tensor y = exchange_rows(
      {exchange, plan, TokenExchange::Direction::combine},
      {x})[0];
  EXPECT_EQ(y.data_ptr(), x.data_ptr());
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones({4, 2})));
}

}  // namespace
}  // namespace flatshard::nn
