// Mistakes that sharded runtimes are known to have made
// (docs/dev/regressions.md), in what one group of parameters does.
#include "tests/group/groups.h"

#include <gtest/gtest.h>

#include <mutex>
#include <type_traits>
#include <vector>

namespace flatshard::testing {
namespace {

static_assert(!std::is_copy_constructible_v<ParamGroup>);

TEST(Pitfalls, B34_WeightsOfFourDimensionsAreCutAtRows) {
  const std::vector<std::int64_t> shape{6, 4, 3, 3};
  for (const Granularity granularity :
       {Granularity::element(), Granularity::row(), Granularity::block(2)}) {
    at::Tensor whole = at::zeros({6 * 4 * 3 * 3});
    at::Tensor expected = at::empty({6 * 4 * 3 * 3});
    Initializer(kGroupSeed)
        .fill(expected, "conv.weight", InitSpec::normal(0, 1), 0);
    std::mutex mutex;
    run_ranks(3, [&](RankContext& context) {
      const ParamGroup group(
          {.name = "conv",
           .parameters =
               {{.names = {"conv.weight"},
                 .shape = shape,
                 .placement = {.granularity = granularity},
                 .init = InitSpec::normal(0, 1)}},
           .mesh = context.mesh(),
           .strategy = Strategy::named("zero3", 1)},
          {.precision = Precision::full()},
          Initializer(kGroupSeed));
      const std::lock_guard lock(mutex);
      for (const NamedShard& shard : group.main_shards()) {
        EXPECT_EQ(shard.shape, shape);
        if (granularity != Granularity::element()) {
          EXPECT_EQ(shard.begin % 3, 0) << granularity.to_string();
        }
        whole.narrow(0, shard.begin, shard.tensor.numel()).add_(shard.tensor);
      }
      // 72 rows of 3 elements (48 with the alignment) over three ranks.
      EXPECT_LT(group.layout().padding_numel(), 3 * 2 * 48);
    });
    EXPECT_TRUE(whole.equal(expected)) << granularity.to_string();
  }
}

// Four ranks read the data of one batch and have one expert each. An expert
// sees the tokens of all, so its gradient is a sum over four ranks' losses.
TEST(Pitfalls, B41_ExpertsDivideByTheRanksThatShareTheirTokens) {
  struct Case {
    double divisor;
    int microbatches;  ///< the sum of several is float32
    Precision precision;
    bool offload;
  };
  const Precision bf16{.reduce = at::kBFloat16};
  const std::vector<Case> cases{
      {4, 1, Precision::full(), false},
      {4, 3, bf16, false},
      {3, 3, bf16, false},
      {4, 3, bf16, true}};
  for (const int ranks : {1, 2}) {
    for (const char* strategy : {"zero0", "zero1", "zero3"}) {
      for (const Case& each : cases) {
        run_ranks(ranks, [&](RankContext& context) {
          const auto mesh = context.mesh();
          const GroupCase c{strategy, {ranks}};
          const auto dense = make_group(c, mesh, each.precision);
          const auto expert = make_group(
              c,
              mesh,
              each.precision,
              GradScaling::mean,
              each.divisor,
              /*matrix=*/{},
              /*grads_in_reduce_dtype=*/false,
              /*keep_compute_weights=*/true,
              each.offload);
          const at::Tensor gradient =
              at::arange(dense->layout().numel(), at::kFloat).remainder(5);
          const auto reduce = [&](ParamGroup& group, double factor, bool last) {
            group.gradients().reduce(
                (gradient * factor).to(each.precision.reduce),
                group.plan_reduction(true, last));
          };
          for (int i = 1; i <= each.microbatches; ++i) {
            reduce(*dense, 1, i == each.microbatches);
            reduce(*expert, each.divisor, i == each.microbatches);
          }
          EXPECT_TRUE(expert->gradients().reduced().local().equal(
              dense->gradients().reduced().local()))
              << strategy << ", " << ranks << " ranks, " << each.divisor << ", "
              << each.microbatches << " microbatches, " << each.offload;
        });
      }
    }
  }
}

TEST(Pitfalls, R7_OneLayoutServesAllBuffersAndSteps) {
  const GroupCase c{"hfsdp", {2, 2}};
  run_ranks(c.world(), [&](RankContext& context) {
    const auto mesh = context.mesh(c.axes());
    for (const Precision& precision :
         {Precision{.reduce = at::kBFloat16}, Precision::full()}) {
      const auto group = make_group(c, mesh, precision);
      const FlatLayout* layout = &group->layout();
      for (int step = 0; step < 3; ++step) {
        for (const bool last : {false, true}) {
          group->gradients().reduce(
              at::zeros({layout->numel()}, precision.reduce),
              group->plan_reduction(true, last));
        }
        EXPECT_EQ(
            group->gradients().reduced().buffer().layout_ptr().get(),
            layout);
        EXPECT_EQ(group->weights().main().layout_ptr().get(), layout);
        EXPECT_EQ(group->weights().compute().layout_ptr().get(), layout);
        group->gradients().zero();
      }
    }
  });
}

TEST(Pitfalls, R13_WeightsKeepTheirAddresses) {
  for (const GroupCase& c :
       {GroupCase{"zero3", {2}}, GroupCase{"zero1", {2}}}) {
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_group(c, context.mesh(c.axes()));
      std::vector<const void*> first;
      for (int step = 0; step < 3; ++step) {
        group->gradients().reduce(
            at::zeros({group->layout().numel()}, at::kBFloat16),
            group->plan_reduction(true, true));
        at::Tensor(group->weights().main().local()).mul_(2);
        EXPECT_TRUE(group->weights().adopt_foreign_writes());
        const at::Tensor out =
            at::empty({group->layout().numel()}, at::kBFloat16);
        group->weights()
            .gather(kComputePlane, kWhole, out, group->weights().plan_gather());
        const std::vector<const void*> now{
            group->weights().main().local().data_ptr(),
            group->weights().compute().local().data_ptr(),
            group->weights().compute_shard().data_ptr()};
        first = first.empty() ? now : first;
        EXPECT_EQ(now, first);
        group->gradients().zero();
      }
    });
  }
}

}  // namespace
}  // namespace flatshard::testing
