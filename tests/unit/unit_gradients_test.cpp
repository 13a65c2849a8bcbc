#include "flatshard/unit/unit_gradients.h"

#include "flatshard/fully_shard/unit_contents.h"
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
        gradients(contents.groups, contents.parameters, true),
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
    // Another backward begins with nothing.
    EXPECT_FALSE(g.gradients.target(g.slot, 0).accumulate);
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

}  // namespace
}  // namespace flatshard
