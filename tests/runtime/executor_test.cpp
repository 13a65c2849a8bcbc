#include "flatshard/runtime/executor.h"
#include "flatshard/core/error.h"
#include "tests/unit/one_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <stdexcept>

namespace flatshard {
namespace {

using testing::one_unit;
using testing::RankContext;
using testing::run_ranks;

/// An Executor with one unit over all ranks.
struct Fixture {
  explicit Fixture(const RankContext& context) {
    units.push_back(one_unit(context, "zero3"));
    executor.emplace(
        units.front()->groups().front()->mesh(),
        units,
        observers,
        RuntimeOptions{});
  }
  void run(ActionKind kind) { executor->execute({.kind = kind, .unit = 0}); }
  Unit& unit() { return *units.front(); }
  SlotView weights() { return executor->held_slots(unit()).weights; }
  SlotView grads() { return executor->held_slots(unit()).grads; }

  Executor::Units units;
  RuntimeObservers observers;
  std::optional<Executor> executor;
};

TEST(Executor, ParametersPointAtGatheredValuesUntilTheRelease) {
  run_ranks(2, [](const RankContext& context) {
    Fixture f(context);
    EXPECT_FALSE(f.executor->has_weights(f.unit()));
    f.run(ActionKind::gather);
    EXPECT_TRUE(f.weights());
    EXPECT_FALSE(f.executor->has_weights(f.unit()));
    f.run(ActionKind::await);
    EXPECT_TRUE(f.executor->has_weights(f.unit()));
    const UnitParameter& weight = f.unit().parameters().front();
    EXPECT_TRUE(
        weight.tensor.detach().equal(at::arange(8, at::kFloat).view({4, 2})));
    f.run(ActionKind::release);
    EXPECT_FALSE(f.executor->has_weights(f.unit()));
    EXPECT_FALSE(f.weights());
  });
}

TEST(Executor, AReductionLeavesTheMeanOfTheRanks) {
  run_ranks(2, [](const RankContext& context) {
    Fixture f(context);
    f.unit().gradients().add(
        0,
        at::full({4, 2}, context.rank == 0 ? 1.0 : 3.0, at::kFloat));
    f.run(ActionKind::reduce);
    EXPECT_TRUE(f.grads());
    f.run(ActionKind::drain);
    f.run(ActionKind::join);
    f.executor->streams().synchronize();
    EXPECT_FALSE(f.grads());
    // The shards of both ranks have the eight numbers of "weight" together.
    const ParamGroup& group = *f.unit().groups().front();
    const at::Tensor sum = group.gradients().reduced().local().sum().view({1});
    f.units.front()->groups().front()->mesh()->world().all_reduce(
        sum,
        ReduceOp::sum);
    EXPECT_EQ(sum.item<double>(), 8 * 2.0);
  });
}

TEST(Executor, ResetGivesEverySlotBack) {
  run_ranks(2, [](const RankContext& context) {
    Fixture f(context);
    f.run(ActionKind::gather);
    f.run(ActionKind::await);
    EXPECT_EQ(f.executor->slots().pool().num_held(), 1);
    f.executor->reset();
    EXPECT_EQ(f.executor->slots().pool().num_held(), 0);
    EXPECT_FALSE(f.executor->has_weights(f.unit()));
    f.run(ActionKind::gather);
    f.run(ActionKind::await);
    EXPECT_TRUE(f.executor->has_weights(f.unit()));
    f.run(ActionKind::release);
  });
}

class Refuses : public SlotObserver {
  void slot_acquired(const Unit&, const SlotKey&, const Slot&) override {
    throw std::runtime_error("no");
  }
};

TEST(Executor, ErrorsNameStepUnitAndAction) {
  run_ranks(2, [](const RankContext& context) {
    Fixture f(context);
    f.observers.add(std::make_shared<Refuses>());
    f.executor->set_step(7);
    try {
      f.run(ActionKind::gather);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_THAT(
          e.what(),
          ::testing::HasSubstr("/2 | step 7 | unit unit | gather"));
    }
    f.executor->reset();
  });
}

}  // namespace
}  // namespace flatshard
