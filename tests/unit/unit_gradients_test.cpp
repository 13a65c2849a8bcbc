#include "flatshard/unit/unit_gradients.h"
#include "flatshard/unit/unit_weights.h"

#include "flatshard/fully_shard/unit_contents.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

/// Two parameters [3] of one group on one rank, and a slot full of sevens.
struct Gradients {
  explicit Gradients(const RankContext& context)
      : contents(make_unit_contents(spec(context), {}, Initializer(0))),
        weights("unit", contents.groups),
        gradients(contents.groups, contents.parameters, weights.layout(), true),
        memory(at::full({gradients.nbytes() / 4}, 7, at::kFloat)),
        slot{memory.mutable_data_ptr(), gradients.nbytes(), at::kCPU} {}

  static GroupSpec spec(const RankContext& context) {
    GroupSpec spec{
        .name = "unit",
        .mesh = context.mesh(),
        .strategy = Strategy::named("zero0", 1)};
    for (const char* name : {"a", "b"}) {
      const at::Tensor values = at::ones({3});
      spec.parameters.push_back(
          {.names = {name},
           .shape = {3},
           .precision = Precision::full(),
           .values = values,
           .tensor = values.clone().requires_grad_()});
    }
    return spec;
  }
  at::Tensor of(std::size_t index) const {
    return gradients.view(slot, contents.parameters[index]);
  }

  UnitContents contents;
  UnitWeights weights;
  UnitGradients gradients;
  at::Tensor memory;
  SlotView slot;
};

void with_gradients(const std::function<void(Gradients&)>& test) {
  run_ranks(1, [&](const RankContext& context) {
    Gradients gradients(context);
    test(gradients);
  });
}

TEST(UnitGradients, WhatNobodyWroteBecomesZero) {
  with_gradients([](Gradients& g) {
    g.gradients.finish(g.slot);
    EXPECT_TRUE(g.of(0).equal(at::zeros({3})));
    EXPECT_TRUE(g.of(1).equal(at::zeros({3})));
    EXPECT_FALSE(g.contents.groups.front()->gradients().contributed());
  });
}

TEST(UnitGradients, GroupsKnowWhichParametersGotOne) {
  with_gradients([](Gradients& g) {
    ParamGroup& group = *g.contents.groups.front();
    const auto contributed = [&](std::size_t i) {
      return group.gradients().contributed(g.contents.parameters[i].index);
    };
    const auto finish = [&](bool collective) {
      g.gradients.finish(g.slot);
      group.plan_reduction(collective, /*is_last=*/true);
    };
    g.gradients.add(1, at::full({3}, 1.0F));
    finish(/*collective=*/false);
    EXPECT_FALSE(group.gradients().contributed());
    finish(/*collective=*/true);  // of both microbatches
    EXPECT_FALSE(contributed(0));
    EXPECT_TRUE(contributed(1));
    // A second reduction of the same backward.
    g.gradients.add(0, at::full({3}, 1.0F));
    finish(/*collective=*/true);
    EXPECT_TRUE(contributed(0) && contributed(1));
    group.gradients().forget_contributions();
    EXPECT_FALSE(group.gradients().contributed());
  });
}

TEST(UnitGradients, LayersOverwriteFirstAndThenAdd) {
  with_gradients([](Gradients& g) {
    nn::WgradTarget target = g.gradients.target(g.slot, 0);
    EXPECT_FALSE(target.accumulate);
    target.grad.fill_(2);
    g.gradients.mark_written(0);
    EXPECT_TRUE(g.gradients.target(g.slot, 0).accumulate);
    EXPECT_FALSE(g.gradients.target(g.slot, 1).accumulate);
    g.gradients.finish(g.slot);
    EXPECT_TRUE(g.of(0).equal(at::full({3}, 2.0F)));
    // Another backward starts without gradients.
    EXPECT_FALSE(g.gradients.target(g.slot, 0).accumulate);
  });
}

TEST(UnitGradients, LayersAddToTheSumOfMicrobatches) {
  with_gradients([](Gradients& g) {
    ParamGroup& group = *g.contents.groups.front();
    EXPECT_FALSE(g.gradients.sum_target(0, true, true, /*may_allocate=*/false)
                     .has_value());
    for (const float step : {1.0F, 2.0F}) {
      const auto target =
          g.gradients.sum_target(0, /*collective=*/true, /*is_last=*/true);
      ASSERT_TRUE(target.has_value());
      EXPECT_EQ(target->accumulate, step == 2);
      target->accumulate ? target->grad.add_(step) : target->grad.fill_(step);
      g.gradients.mark_written(0);
      // The layer's second call, and another layer that writes into the slot.
      EXPECT_TRUE(g.gradients.sum_target(0, true, true)->accumulate);
      EXPECT_FALSE(g.gradients.target(g.slot, 0).accumulate);
      if (step == 2) {
        g.gradients.target(g.slot, 0).grad.fill_(40);
        g.gradients.mark_written(0);
      }
      g.gradients.add(1, at::full({3}, step));
      g.gradients.finish(g.slot);
      EXPECT_EQ(g.of(0).equal(at::full({3}, 7)), step == 1);  // not touched
      group.gradients().reduce(
          g.memory.narrow(0, 0, group.layout().numel()),
          group.plan_reduction(true, true));
    }
    const at::Tensor sum = group.gradients().reduced().local();
    const auto of = [&](std::size_t i) {
      const std::int64_t index = g.contents.parameters[i].index;
      return sum.narrow(0, group.layout().tensor_offset(index), 3);
    };
    // Their parts of slots were reduced to the sum, until the next step.
    EXPECT_FALSE(g.gradients.sum_target(0, true, true).has_value());
    EXPECT_FALSE(g.gradients.sum_target(1, true, true).has_value());
    EXPECT_TRUE(of(0).equal(at::full({3}, 43.0F)));
    EXPECT_TRUE(of(1).equal(at::full({3}, 3.0F)));
    EXPECT_TRUE(group.gradients().contributed(0));
  });
}

TEST(UnitGradients, TensorsAddUpAndAreAddedToWhatLayersWrote) {
  with_gradients([](Gradients& g) {
    g.gradients.add(0, at::full({3}, 1.0F));
    g.gradients.add(0, at::full({3}, 4.0F));
    g.gradients.target(g.slot, 1).grad.fill_(10);
    g.gradients.mark_written(1);
    g.gradients.add(1, at::full({3}, 3.0F));
    EXPECT_EQ(g.gradients.num_pending(), 2U);
    g.gradients.finish(g.slot);
    EXPECT_EQ(g.gradients.num_pending(), 0U);
    EXPECT_TRUE(g.of(0).equal(at::full({3}, 5.0F)));
    EXPECT_TRUE(g.of(1).equal(at::full({3}, 13.0F)));
  });
}

TEST(UnitGradients, AnUnfinishedBackwardIsForgotten) {
  with_gradients([](Gradients& g) {
    g.gradients.add(0, at::ones({3}));
    g.gradients.mark_written(1);
    g.contents.parameters[0].tensor.mutable_grad() = at::ones({3});
    g.gradients.drop();
    EXPECT_EQ(g.gradients.num_pending(), 0U);
    EXPECT_FALSE(g.gradients.target(g.slot, 1).accumulate);
    EXPECT_FALSE(g.contents.parameters[0].tensor.grad().defined());
  });
}

TEST(UnitContents, AParameterIsShownInAnotherOrderOfDimensions) {
  run_ranks(1, [](const RankContext& context) {
    const at::Tensor values = at::arange(6, at::kFloat).view({3, 2});
    GroupSpec spec{
        .name = "unit",
        .mesh = context.mesh(),
        .strategy = Strategy::named("zero0", 1)};
    spec.parameters.push_back(
        {.names = {"a"},
         .shape = {3, 2},
         .precision = Precision::full(),
         .values = values,
         .tensor = at::empty({3, 2}).t().requires_grad_()});
    UnitContents contents = make_unit_contents(spec, {}, Initializer(0));
    const UnitParameter& p = contents.parameters.front();
    p.storage.point_at(
        contents.groups.front()->weights().compute().local().data_ptr());
    EXPECT_TRUE(p.tensor.equal(values.t()));
    const UnitWeights weights("unit", contents.groups);
    UnitGradients gradients(
        contents.groups,
        contents.parameters,
        weights.layout(),
        true);
    const at::Tensor memory = at::zeros({gradients.nbytes() / 4});
    const SlotView slot{
        memory.mutable_data_ptr(),
        gradients.nbytes(),
        at::kCPU};
    gradients.add(0, values.t());
    gradients.finish(slot);
    EXPECT_TRUE(memory.narrow(0, 0, 6).equal(values.flatten()));
  });
}

TEST(UnitContents, GroupsWithoutWeightsAndGroupsApart) {
  run_ranks(2, [](const RankContext& context) {
    GroupSpec spec{
        .name = "unit",
        .mesh = context.mesh(),
        .strategy = Strategy::named("zero3", 1)};
    const auto add = [&](const char* name, bool requires_grad) {
      spec.parameters.push_back(
          {.names = {name},
           .shape = {4},
           .precision = Precision::full(),
           .tensor = at::zeros({4}).set_requires_grad(requires_grad)});
      return &spec.parameters.back();
    };
    add("trained", true);
    add("frozen", false);
    GroupParameter* later = add("trained later", false);
    later->trainable = true;
    later->apart = 1;
    add("gathered otherwise", true)->has_weights = false;
    const UnitContents contents =
        make_unit_contents(std::move(spec), {}, Initializer(0));
    ASSERT_EQ(contents.groups.size(), 4U);
    const auto group_of = [&](const std::string& name) -> const ParamGroup& {
      for (const auto& p : contents.parameters) {
        if (p.name == name) {
          return *contents.groups[p.group];
        }
      }
      ADD_FAILURE() << name;
      return *contents.groups.front();
    };
    EXPECT_TRUE(group_of("trained later").trainable());
    EXPECT_FALSE(group_of("frozen").trainable());
    const ParamGroup& without = group_of("gathered otherwise");
    EXPECT_TRUE(without.trainable());
    EXPECT_TRUE(without.weights().main().local().is_meta());
    EXPECT_FALSE(without.weights().compute().defined());
    const UnitWeights weights("unit", contents.groups);
    EXPECT_EQ(weights.nbytes(kComputePlane, kWhole), 3 * SlotPlan::kAlignment);
  });
}

}  // namespace
}  // namespace flatshard
