// Exact values of the gradient pipeline: whole numbers and ranks that are
// powers of two leave nothing to rounding.
#include "flatshard/group/param_group.h"

#include "tests/group/groups.h"
#include "tests/support/sum_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr Precision kWide{
    .compute = at::kBFloat16,
    .reduce = at::kFloat,
    .main_params = at::kFloat,
    .main_grads = at::kFloat};
// bf16 on the wire, summed up in float32.
constexpr Precision kNarrowWire{.reduce = at::kBFloat16};
constexpr Precision kHalfWire{.reduce = at::kHalf};

struct Micro {
  bool collective = true;
  bool is_last = true;
};
using Sequence = std::vector<Micro>;

const std::vector<Sequence>& sequences() {
  static const std::vector<Sequence> all{
      {{true, true}},
      {{true, false}, {true, false}, {true, true}},
      {{false, false}, {false, false}, {true, true}},
      {{true, false}, {false, false}, {true, true}},
      {{false, false}, {true, false}, {true, true}},
      {{true, true}, {true, true}}};
  return all;
}

// Returns the gradient of one rank in one microbatch: small whole numbers in
// all tensors, zero in the padding.
at::Tensor gradient(
    const FlatLayout& layout,
    int rank,
    std::size_t micro,
    at::ScalarType dtype) {
  const at::Tensor flat = at::zeros({layout.numel()});
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const std::int64_t n = layout.tensor_numel(i);
    flat.narrow(0, layout.tensor_offset(i), n)
        .copy_(
            (at::remainder(at::arange(n, at::kFloat), 3) - 1 + i) * (rank + 1) *
            static_cast<double>(micro + 1));
  }
  return flat.to(dtype);
}

// Checks one rank's part of a full flat tensor, by its shards.
void expect_grad(const ParamGroup& group, const at::Tensor& whole) {
  const at::Tensor& local = group.gradients().reduced().local();
  const at::Tensor covered = at::zeros({local.numel()});
  for (const NamedShard& shard : group.shards_of(local)) {
    const auto index = group.layout().find(shard.name()).value();
    const at::Tensor want = whole.narrow(
        0,
        group.layout().tensor_offset(index) + shard.begin,
        shard.tensor.numel());
    EXPECT_TRUE(shard.tensor.equal(want.to(shard.tensor.scalar_type())))
        << shard.name() << "\n"
        << shard.tensor << want;
    covered.narrow(0, shard.local_offset, shard.tensor.numel()).fill_(1);
  }
  EXPECT_EQ((local * (1 - covered)).abs().sum().item<double>(), 0)
      << "padding is not zero";
}

// Thirds are not exact.
std::vector<GroupCase> exact_cases() {
  std::vector<GroupCase> cases = all_cases();
  std::erase_if(cases, [](const GroupCase& c) {
    return (c.world() & (c.world() - 1)) != 0;
  });
  return cases;
}

struct ReduceCase {
  GradScaling scaling;
  double divisor;
  Precision precision;
  bool grads_in_reduce_dtype = false;
  bool offload = false;
};

class Reductions : public ::testing::TestWithParam<GroupCase> {};

TEST_P(Reductions, ExactValues) {
  const GroupCase& c = GetParam();
  const std::vector<ReduceCase> modes{
      {GradScaling::mean, 1, kWide},
      {GradScaling::mean, 2, kWide},
      {GradScaling::pre_scaled, 1, kWide},
      {GradScaling::sum, 4, kWide},
      {GradScaling::mean, 1, kNarrowWire},
      {GradScaling::sum, 2, kNarrowWire},
      {GradScaling::mean, 1, kNarrowWire, true},
      {GradScaling::sum, 2, kNarrowWire, true},
      {GradScaling::mean, 1, kNarrowWire, true, true},
      {GradScaling::mean, 1, kHalfWire},
      {GradScaling::mean, 2, kHalfWire},
      {GradScaling::pre_scaled, 2, kHalfWire},
      {GradScaling::sum, 4, kHalfWire, true},
      {GradScaling::mean, 2, kHalfWire, true, true},
      {GradScaling::sum, 4, kWide, false, true}};
  run_ranks(c.world(), [&](RankContext& context) {
    const auto mesh = context.mesh(c.axes());
    for (const ReduceCase& mode : modes) {
      const auto group = make_group(
          c,
          mesh,
          mode.precision,
          mode.scaling,
          mode.divisor,
          {},
          mode.grads_in_reduce_dtype,
          /*keep_compute_weights=*/true,
          mode.offload);
      const FlatLayout& layout = group->layout();
      for (const Sequence& sequence : sequences()) {
        at::Tensor want = at::zeros({layout.numel()});
        for (std::size_t m = 0; m < sequence.size(); ++m) {
          for (int rank = 0; rank < c.world(); ++rank) {
            want += gradient(layout, rank, m, at::kFloat);
          }
          const at::Tensor slot =
              gradient(layout, context.rank, m, mode.precision.reduce);
          const auto plan = group->plan_reduction(
              sequence[m].collective,
              sequence[m].is_last);
          group->gradients().reduce(slot, plan);
        }
        want /=
            mode.divisor * (mode.scaling == GradScaling::sum ? 1 : c.world());
        EXPECT_TRUE(group->gradients().reduced().exists());
        EXPECT_FALSE(group->gradients().has_unreduced());
        expect_grad(*group, want);
        group->gradients().scale(0.5);
        expect_grad(*group, want * 0.5);
        group->gradients().zero();
        EXPECT_FALSE(group->gradients().reduced().exists());
      }
    }
  });
}

// The factors of FSDP2's _get_gradient_divide_factors.
TEST(Division, Float16IsDividedOnBothSidesOfTheSum) {
  struct Factors {
    int ranks;
    double divisor;
    GradScaling scaling;
    double before;
    double after;
  };
  for (const Factors& f :
       {Factors{1, 1, GradScaling::mean, 1, 1},
        Factors{2, 1, GradScaling::mean, 2, 1},
        Factors{3, 1, GradScaling::mean, 2, 1.5},
        Factors{4, 1, GradScaling::mean, 2, 2},
        Factors{8, 1, GradScaling::mean, 4, 2},
        Factors{8, 2, GradScaling::mean, 4, 4},
        Factors{4, 6, GradScaling::sum, 4, 1.5},
        Factors{4, 0.5, GradScaling::sum, 1, 0.5}}) {
    const GradDivision found = grad_division(
        {.precision = kHalfWire,
         .scaling = f.scaling,
         .grad_divisor = f.divisor},
        f.ranks);
    EXPECT_EQ(found.op, ReduceOp::sum);
    EXPECT_EQ(found.before, f.before) << f.ranks << " " << f.divisor;
    EXPECT_EQ(found.on_wire, f.after) << f.ranks << " " << f.divisor;
    EXPECT_EQ(found.at_rest, 1);
  }
}

TEST(Division, OtherDtypesAreAveragedUnlessOnlySumsAreAskedFor) {
  const GradDivision mean =
      grad_division({.precision = kNarrowWire, .grad_divisor = 3}, 4);
  EXPECT_EQ(mean.op, ReduceOp::avg);
  EXPECT_EQ(mean.before, 1);
  EXPECT_EQ(mean.on_wire, 1);
  EXPECT_EQ(mean.at_rest, 3);
  const GradDivision sum = grad_division(
      {.precision = kNarrowWire, .grad_divisor = 3, .sums_only = true},
      4);
  EXPECT_EQ(sum.op, ReduceOp::sum);
  EXPECT_EQ(sum.before, 1);
  EXPECT_EQ(sum.on_wire, 12);
  EXPECT_EQ(sum.at_rest, 1);
}

// 40000 + 40000 overflows float16: the sum over ranks, and the sum of one
// rank's microbatches.
TEST(Reduction, LargeFloat16GradientsDoNotOverflow) {
  for (const double divisor : {0.0, 2.0}) {  // 0: the mean
    run_ranks(2, [&](RankContext& context) {
      const auto group = make_group(
          {"zero3", {2}},
          context.mesh(),
          {.reduce = at::kHalf, .main_grads = at::kFloat});
      if (divisor > 0) {
        group->set_divisor(divisor);
      }
      const std::int64_t n = group->layout().numel();
      const auto reduce = [&](double value, bool collective) {
        group->gradients().reduce(
            at::full({n}, value, at::kHalf),
            group->plan_reduction(collective, collective));
      };
      const auto all_are = [&](double value) {
        return group->gradients()
            .reduced()
            .local()
            .eq(value)
            .all()
            .item<bool>();
      };
      reduce(40000, true);
      EXPECT_TRUE(all_are(40000));
      group->gradients().zero();
      const double own = context.rank == 0 ? 40000 : 0;
      reduce(own, false);
      reduce(own, true);
      EXPECT_TRUE(all_are(40000));
    });
  }
}

// The sum, 3.0088, is 3.015625 in bfloat16, a third of which is 1.0078125
// there. A mean is rounded once, to 1.
TEST(Reduction, OnlySumsOnTheWireAreDividedAfterwards) {
  run_ranks(3, [](RankContext& context) {
    const auto group = make_group({"zero3", {3}}, context.mesh(), kNarrowWire);
    const auto reduced = [&] {
      group->gradients().zero();
      group->gradients().reduce(
          at::full(
              {group->layout().numel()},
              std::vector<double>{1, 2, 9.0 / 1024}[context.rank],
              at::kBFloat16),
          group->plan_reduction(true, true));
      return group->gradients().reduced().local().max().item<double>();
    };
    EXPECT_EQ(reduced(), 1);
    group->set_sums_only(true);
    EXPECT_EQ(reduced(), 1.0078125);
    group->set_sums_only(false);
    EXPECT_EQ(reduced(), 1);
  });
}

// Makes a group whose gradient is stored in the dtype of the wire.
std::unique_ptr<ParamGroup> make_narrow_group(
    RankContext& context,
    double grad_divisor) {
  return make_group(
      {"zero3", {2}},
      context.mesh(),
      kNarrowWire,
      GradScaling::mean,
      grad_divisor,
      {},
      /*grads_in_reduce_dtype=*/true);
}

// Experts' gradients have a divisor that no collective has.
TEST(Reduction, B41_ADivisorLeavesAGradientNarrow) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_narrow_group(context, /*grad_divisor=*/4);
    const std::int64_t n = group->layout().numel();
    group->gradients().reduce(
        at::full({n}, 1.0 + context.rank, at::kBFloat16),
        group->plan_reduction(true, true));
    EXPECT_EQ(
        group->gradients().reduced().local().scalar_type(),
        at::kBFloat16);
    EXPECT_TRUE(
        group->gradients().reduced().local().eq(1.5 / 4).all().item<bool>());
    group->gradients().reduce(
        at::full({n}, 1.0, at::kBFloat16),
        group->plan_reduction(true, true));
    EXPECT_TRUE(group->gradients()
                    .reduced()
                    .local()
                    .eq((1.5 + 1) / 4)
                    .all()
                    .item<bool>());
  });
}

// 1 + 1/512 needs more than the eight bits of a bfloat16.
TEST(Reduction, ASecondOneWidensANarrowGradient) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_narrow_group(context, /*grad_divisor=*/1);
    const std::int64_t n = group->layout().numel();
    const auto reduce = [&](double value, bool is_last) {
      group->gradients().reduce(
          at::full({n}, value, at::kBFloat16),
          group->plan_reduction(true, is_last));
    };
    reduce(1, true);
    EXPECT_EQ(
        group->gradients().reduced().local().scalar_type(),
        at::kBFloat16);
    EXPECT_EQ(group->gradients().nbytes().reduced, n / 2 * 2);
    reduce(1.0 / 512, true);
    EXPECT_EQ(group->gradients().reduced().local().scalar_type(), at::kFloat);
    EXPECT_TRUE(group->gradients()
                    .reduced()
                    .local()
                    .eq(1 + 1.0 / 512)
                    .all()
                    .item<bool>());
    group->gradients().zero();
    EXPECT_EQ(group->gradients().nbytes().reduced, 0);
    reduce(1, true);
    group->gradients().scale(1 + 1.0 / 512);
    EXPECT_TRUE(group->gradients()
                    .reduced()
                    .local()
                    .eq(1 + 1.0 / 512)
                    .all()
                    .item<bool>());
    group->gradients().zero();
    reduce(1, false);  // another one is announced
    EXPECT_EQ(group->gradients().reduced().local().scalar_type(), at::kFloat);
  });
}

void reduce_all(ParamGroup& group, double value) {
  group.gradients().reduce(
      at::full({group.layout().numel()}, value),
      group.plan_reduction(true, true));
}

std::unique_ptr<ParamGroup> make_offloaded(std::shared_ptr<Mesh> mesh) {
  return make_group(
      {"zero3", {2}},
      std::move(mesh),
      kWide,
      GradScaling::mean,
      1,
      {},
      /*grads_in_reduce_dtype=*/false,
      /*keep_compute_weights=*/false,
      /*offload=*/true);
}

TEST(Reduction, AGradientThatWasGivenUpGoesWithItsLastHolder) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_group({"zero3", {2}}, context.mesh(), kWide);
    const std::int64_t n = group->layout().numel();
    reduce_all(*group, 1);
    at::Tensor held = group->gradients().reduced().local();
    group->gradients().reduced().give_up();
    EXPECT_TRUE(group->gradients().reduced().exists());
    EXPECT_EQ(group->gradients().nbytes().reduced, n / 2 * 4);
    EXPECT_THAT(
        [&] { reduce_all(*group, 2); },
        ThrowsMessage<Error>(HasSubstr("is others': take_back() comes first")));
    EXPECT_THROW(group->gradients().reduced().buffer(), Error);
    EXPECT_THROW(group->gradients().scale(2), Error);

    group->gradients().reduced().take_back();
    EXPECT_EQ(group->gradients().reduced().local().data_ptr(), held.data_ptr());
    reduce_all(*group, 2);
    EXPECT_TRUE(held.eq(3).all().item<bool>());

    group->gradients().reduced().give_up();
    held = at::Tensor();
    EXPECT_FALSE(group->gradients().reduced().exists());
    EXPECT_EQ(group->gradients().nbytes().reduced, 0);
    group->gradients().reduced().take_back();
    EXPECT_FALSE(group->gradients().reduced().exists());
    reduce_all(*group, 4);
    EXPECT_TRUE(group->gradients().reduced().local().eq(4).all().item<bool>());

    held = group->gradients().reduced().local();
    group->gradients().reduced().give_up();
    group->gradients().zero();  // while somebody holds it
    EXPECT_FALSE(group->gradients().reduced().exists());
    reduce_all(*group, 5);
    EXPECT_TRUE(held.eq(4).all().item<bool>());
    EXPECT_TRUE(group->gradients().reduced().local().eq(5).all().item<bool>());
  });
}

TEST(Reduction, AnOffloadedGradientIsNotLent) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_offloaded(context.mesh());
    reduce_all(*group, 1);
    group->gradients().reduced().give_up();
    EXPECT_TRUE(group->gradients().reduced().local().eq(1).all().item<bool>());
  });
}

// Pinned memory is allocated once. A gradient that the user kept stays valid.
TEST(Reduction, AnOffloadedGradientUsesItsMemoryAgainUnlessSomebodyKeptIt) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_offloaded(context.mesh());
    reduce_all(*group, 1);
    const void* const first = group->gradients().reduced().local().data_ptr();
    group->gradients().zero();
    EXPECT_FALSE(group->gradients().reduced().buffer().defined());
    reduce_all(*group, 2);
    EXPECT_EQ(group->gradients().reduced().local().data_ptr(), first);
    EXPECT_TRUE(group->gradients().reduced().local().eq(2).all().item<bool>());
    const at::Tensor kept = group->gradients().reduced().local();
    group->gradients().zero();
    reduce_all(*group, 3);
    EXPECT_TRUE(kept.eq(2).all().item<bool>());
    EXPECT_TRUE(group->gradients().reduced().local().eq(3).all().item<bool>());
  });
}

TEST_P(Reductions, B26_UnreducedGradientsAreScaledToo) {
  const GroupCase& c = GetParam();
  run_ranks(c.world(), [&](RankContext& context) {
    const auto mesh = context.mesh(c.axes());
    for (const bool collective : {false, true}) {
      const auto group = make_group(c, mesh, kWide);
      const FlatLayout& layout = group->layout();
      at::Tensor want = at::zeros({layout.numel()});
      for (int rank = 0; rank < c.world(); ++rank) {
        want += gradient(layout, rank, 0, at::kFloat) * 0.25 +
                gradient(layout, rank, 1, at::kFloat);
      }
      group->gradients().reduce(
          gradient(layout, context.rank, 0, at::kFloat),
          group->plan_reduction(collective, false));
      group->gradients().scale(0.25);
      group->gradients().reduce(
          gradient(layout, context.rank, 1, at::kFloat),
          group->plan_reduction(true, true));
      expect_grad(*group, want / c.world());
    }
  });
}

// With three ranks in a group nothing is exact, but all strategies must agree
// with the mean within a few units of float32.
TEST(Reduction, ThreeRanksAreCloseToTheMean) {
  const GroupCase c{"hfsdp", {2, 3}};
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()), kWide);
    const FlatLayout& layout = group->layout();
    at::Tensor want = at::zeros({layout.numel()});
    for (int rank = 0; rank < c.world(); ++rank) {
      want += gradient(layout, rank, 0, at::kFloat) / c.world();
    }
    group->gradients().reduce(
        gradient(layout, context.rank, 0, at::kFloat),
        group->plan_reduction(true, true));
    for (const NamedShard& shard :
         group->shards_of(group->gradients().reduced().local())) {
      if (shard.tensor.numel() == 0) {
        continue;
      }
      const auto index = layout.find(shard.name()).value();
      const at::Tensor part = want.narrow(
          0,
          layout.tensor_offset(index) + shard.begin,
          shard.tensor.numel());
      EXPECT_LE(
          (shard.tensor - part).abs().max().item<double>(),
          sum_tolerance(
              {.addends = c.world(), .size = want.abs().max().item<double>()}));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    Reductions,
    ::testing::ValuesIn(exact_cases()),
    ::testing::PrintToStringParamName());

}  // namespace
}  // namespace flatshard::testing
