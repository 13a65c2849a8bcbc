// The steps of a gradient's reduction, by strategy and microbatch.
#include "flatshard/group/gradient_pipeline.h"

#include "tests/group/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

namespace flatshard::testing {
namespace {

using ::testing::ElementsAre;

// E.g. "inner + inner": the path, and what waits and is added to.
std::string to_string(const GradientPipeline::Reduction& r) {
  using Path = GradientPipeline::Path;
  std::string text;
  switch (r.path) {
    case Path::local:
      text = "local";
      break;
    case Path::inner:
      text = "inner";
      break;
    case Path::rest:
      text = "rest";
      break;
    case Path::outer:
      text = "outer";
      break;
    case Path::outer_of_slot:
      text = "outer of slot";
      break;
  }
  return text + (r.adds.local ? " + local" : "") +
         (r.adds.inner ? " + inner" : "") +
         (r.adds.reduced ? " + reduced" : "");
}

// Returns the paths of two microbatches that reduce, or of which the first
// accumulates (no_sync).
std::vector<std::string> paths(const GroupCase& c, bool accumulates) {
  std::vector<std::string> paths;
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()));
    const at::Tensor slot = at::zeros({group->layout().numel()});
    std::vector<std::string> own;
    for (const bool is_last : {false, true}) {
      const auto reduction =
          group->plan_reduction(!accumulates || is_last, is_last);
      group->gradients().reduce(slot, reduction);
      own.push_back(to_string(reduction));
    }
    if (context.rank == 0) {
      paths = own;
    }
  });
  return paths;
}

TEST(GradientPipeline, OneReductionOverAllAxes) {
  for (const GroupCase& c :
       {GroupCase{"zero2", {3}}, {"zero3", {4}}, {"zero3", {2, 2}}}) {
    EXPECT_THAT(paths(c, false), ElementsAre("rest", "rest + reduced")) << c;
    EXPECT_THAT(paths(c, true), ElementsAre("local", "rest + local")) << c;
  }
}

TEST(GradientPipeline, AccumulatedGradientsAreReducedOnce) {
  for (const GroupCase& c :
       {GroupCase{"zero0", {2}}, {"zero1", {2}}, {"zero1", {2, 2}}}) {
    EXPECT_THAT(paths(c, true), ElementsAre("local", "rest + local")) << c;
  }
}

TEST(GradientPipeline, OuterAxesAreReducedInTheLastMicrobatch) {
  for (const GroupCase& c :
       {GroupCase{"hsdp", {2, 2}}, {"hfsdp", {2, 2}}, {"hsdp_zero2", {2, 2}}}) {
    EXPECT_THAT(paths(c, false), ElementsAre("inner", "outer + inner")) << c;
    EXPECT_THAT(paths(c, true), ElementsAre("local", "outer + local")) << c;
  }
}

// Returns the gradient of a step of three microbatches. With `opens`,
// parameters 0 and 2 are added to the open sum. Their parts of the slot are
// NaN, except for parameter 2 in the second microbatch.
at::Tensor sum_of_three(const GroupCase& c, bool accumulates, bool opens) {
  at::Tensor sum;
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()));
    const FlatLayout& layout = group->layout();
    for (std::int64_t microbatch = 0; microbatch < 3; ++microbatch) {
      const bool is_last = microbatch == 2;
      const bool collective = !accumulates || is_last;
      at::Tensor slot = at::arange(layout.numel(), at::kFloat)
                            .add(3 * microbatch)
                            .to(at::kBFloat16);
      for (const FlatRange& range : layout.padding_ranges()) {
        slot.narrow(0, range.offset, range.numel).zero_();
      }
      for (const std::int64_t i : {0, 2}) {
        const auto open = opens
                              ? group->gradients().open_sum(collective, is_last)
                              : std::nullopt;
        EXPECT_EQ(open.has_value(), opens);
        if (!open) {
          continue;
        }
        const bool is_in_slot = i == 2 && microbatch == 1;
        const auto part = [&](const at::Tensor& flat) {
          return flat.narrow(
              0,
              layout.tensor_offset(i),
              layout.tensor_numel(i));
        };
        at::Tensor into = part(open->flat);
        // Halves, so that both are exact.
        const at::Tensor value =
            is_in_slot ? part(slot).to(at::kFloat) / 2 : part(slot);
        open->add ? into.add_(value) : into.copy_(value);
        is_in_slot ? part(slot).div_(2) : part(slot).fill_(NAN);
        group->gradients().mark_summed(i, is_in_slot);
      }
      group->gradients().reduce(
          slot,
          group->plan_reduction(collective, is_last));
    }
    if (context.rank == 0) {
      sum = group->gradients().reduced().local().clone();
    }
  });
  return sum;
}

TEST(GradientPipeline, AnOpenSumGetsGradientsBeforeTheReduction) {
  for (const auto& [c, accumulates] : std::vector<std::pair<GroupCase, bool>>{
           {{"zero2", {1}}, false},
           {{"zero3", {1}}, false},
           {{"zero1", {2}}, true},
           {{"zero3", {2}}, true},
           {{"hsdp", {2, 2}}, true}}) {
    const at::Tensor expected = sum_of_three(c, accumulates, /*opens=*/false);
    const at::Tensor sum = sum_of_three(c, accumulates, /*opens=*/true);
    EXPECT_TRUE(sum.equal(expected)) << c;
  }
}

TEST(GradientPipeline, NoSumIsOpenWhereReductionsDoMoreThanAdd) {
  const auto opens = [](const GroupCase& c,
                        GradScaling scaling,
                        double divisor,
                        bool collective) {
    bool opened = false;
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_group(
          c,
          context.mesh(c.axes()),
          {.reduce = at::kBFloat16},
          scaling,
          divisor);
      const bool own =
          group->gradients().open_sum(collective, true).has_value();
      if (context.rank == 0) {
        opened = own;
      }
    });
    return opened;
  };
  const GroupCase one{"zero2", {1}};
  const GroupCase two{"zero2", {2}};
  EXPECT_TRUE(opens(one, GradScaling::mean, 1, true));
  EXPECT_FALSE(opens(one, GradScaling::sum, 2, true));
  EXPECT_FALSE(opens(two, GradScaling::mean, 1, true));
  EXPECT_TRUE(opens(two, GradScaling::mean, 1, false));
  EXPECT_FALSE(opens(two, GradScaling::pre_scaled, 1, false));
}

TEST(GradientPipeline, AnOpenSumWithoutAReductionIsDropped) {
  run_ranks(1, [](RankContext& context) {
    const GroupCase c{"zero2", {1}};
    const auto group = make_group(c, context.mesh(c.axes()));
    GradientPipeline& gradients = group->gradients();
    gradients.open_sum(true, true)->flat.fill_(NAN);
    gradients.mark_summed(0, false);
    gradients.close_sum();
    EXPECT_TRUE(gradients.is_empty());
    const at::Tensor slot = at::ones({group->layout().numel()}, at::kBFloat16);
    gradients.reduce(slot, group->plan_reduction(true, true));
    EXPECT_TRUE(gradients.reduced().local().equal(slot.to(at::kFloat)));
  });
}

TEST(GradientPipeline, ABackwardWithoutAReductionKeepsAGradientInAnotherDtype) {
  run_ranks(1, [](RankContext& context) {
    const GroupCase c{"zero2", {1}};
    const auto group = make_group(
        c,
        context.mesh(c.axes()),
        {.reduce = at::kBFloat16},
        GradScaling::mean,
        /*grad_divisor=*/1,
        {},
        /*grads_in_reduce_dtype=*/true);
    GradientPipeline& gradients = group->gradients();
    const at::Tensor slot = at::ones({group->layout().numel()}, at::kBFloat16);
    EXPECT_FALSE(gradients.open_sum(true, true));
    gradients.reduce(slot, group->plan_reduction(true, true));
    EXPECT_FALSE(gradients.open_sum(true, true));
    gradients.close_sum();
    const at::Tensor kept = gradients.reduced().local();
    ASSERT_EQ(kept.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(kept.equal(slot));
  });
}

}  // namespace
}  // namespace flatshard::testing
