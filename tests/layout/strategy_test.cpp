#include "flatshard/layout/strategy.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/layout/expect_error.h"
#include "tests/layout/placements.h"

namespace flatshard {
namespace {

using testing::kP;
using testing::kR;
using testing::kS;

void expect_named(
    const char* name,
    Placements parameter,
    Placements gradient,
    Placements optimizer) {
  const auto strategy =
      Strategy::named(name, static_cast<int>(parameter.size()));
  EXPECT_EQ(strategy, (Strategy{name, parameter, gradient, optimizer}))
      << name << ": " << to_string(strategy.parameter) << " "
      << to_string(strategy.gradient) << " " << to_string(strategy.optimizer);
  EXPECT_NO_THROW(strategy.validate());
}

TEST(Strategy, NamedOverOneAxis) {
  for (const char* name : {"no_shard", "zero0"}) {
    expect_named(name, {kR}, {kP}, {kR});
  }
  for (const char* name : {"optim", "zero1"}) {
    expect_named(name, {kR}, {kP}, {kS});
  }
  for (const char* name : {"optim_grads", "zero2"}) {
    expect_named(name, {kR}, {kS}, {kS});
  }
  for (const char* name : {"optim_grads_params", "zero3"}) {
    expect_named(name, {kS}, {kS}, {kS});
  }
}

TEST(Strategy, NamedOverTwoAxes) {
  expect_named("zero0", {kR, kR}, {kP, kP}, {kR, kR});
  expect_named("zero1", {kR, kR}, {kP, kP}, {kS, kS});
  expect_named("zero2", {kR, kR}, {kS, kS}, {kS, kS});
  expect_named("zero3", {kS, kS}, {kS, kS}, {kS, kS});
  expect_named("hsdp", {kR, kS}, {kP, kS}, {kR, kS});
  expect_named("hfsdp", {kR, kS}, {kP, kS}, {kS, kS});
  expect_named("hsdp_zero1", {kR, kR}, {kP, kP}, {kR, kS});
  expect_named("hsdp_zero2", {kR, kR}, {kP, kS}, {kR, kS});
}

TEST(Strategy, NamedOverThreeAxes) {
  expect_named("hsdp", {kR, kS, kS}, {kP, kS, kS}, {kR, kS, kS});
  expect_named("hfsdp", {kR, kS, kS}, {kP, kS, kS}, {kS, kS, kS});
}

TEST(Strategy, NamedTakesTheReduction) {
  EXPECT_EQ(
      Strategy::named("hsdp", 2, ReduceOp::sum).gradient,
      (Placements{Placement::partial(ReduceOp::sum), kS}));
}

TEST(Strategy, TheTableIsOneForAllNames) {
  for (const StrategyName& row : strategy_names()) {
    EXPECT_EQ(&find_strategy_name(row.name), &row);
    Strategy named = Strategy::named(row.name, 2);
    EXPECT_NO_THROW(named.validate()) << row.name;
    if (row.needs_outer_axis()) {
      continue;
    }
    Strategy other = Strategy::named(row.other_name, 2);
    other.name = named.name;
    EXPECT_EQ(other, named);
    // Replicas along axis 0 change nothing within the inner axes.
    const Strategy replicas = Strategy::named(row.with_replicas, 2);
    EXPECT_TRUE(replicas.optimizer[0].is_replicate()) << row.name;
    EXPECT_EQ(replicas.optimizer[1], named.optimizer[1]) << row.name;
    EXPECT_EQ(replicas.parameter[1], named.parameter[1]) << row.name;
    EXPECT_EQ(replicas.gradient[1], named.gradient[1]) << row.name;
  }
}

TEST(Strategy, NamedRefusesByName) {
  expect_error(
      ErrorCode::config,
      "unknown strategy 'zero4'; expected one of zero0 (no_shard), zero1 "
      "(optim)",
      [] { Strategy::named("zero4", 1); });
  expect_error(
      ErrorCode::config,
      "strategy 'hsdp' needs at least 2 mesh axes, got 1",
      [] { Strategy::named("hsdp", 1); });
  expect_error(
      ErrorCode::config,
      "strategy 'zero3' needs at least 1 mesh axes, got 0",
      [] { Strategy::named("zero3", 0); });
}

TEST(Strategy, NumShardsFollowsTheOptimizer) {
  const std::array<std::int64_t, 2> sizes{2, 4};
  EXPECT_EQ(Strategy::named("no_shard", 2).num_shards(sizes), 1);
  EXPECT_EQ(Strategy::named("zero1", 2).num_shards(sizes), 8);
  EXPECT_EQ(Strategy::named("hsdp", 2).num_shards(sizes), 4);
  EXPECT_EQ(Strategy::named("hfsdp", 2).num_shards(sizes), 8);
  expect_error(
      ErrorCode::usage,
      "strategy 'zero3' has 1 axes, the mesh has 2",
      [&] { Strategy::named("zero3", 1).num_shards(sizes); });
}

struct Refused {
  Strategy strategy;
  const char* message;
};

TEST(Strategy, ValidateNamesWhatIsWrong) {
  const std::vector<Refused> cases = {
      {{"x", {}, {}, {}}, "strategy 'x': parameter has no placements"},
      {{"x", {kR}, {kP, kP}, {kR}},
       "strategy 'x': gradient has 2 placements but parameter has 1"},
      {{"x", {kR, kR}, {kP, kP}, {kR}},
       "strategy 'x': optimizer has 1 placements but parameter has 2"},
      {{"x", {kP}, {kP}, {kR}},
       "strategy 'x': parameter on axis 0 is Partial(avg); expected Replicate "
       "or Shard"},
      {{"x", {kR, kR}, {kP, kP}, {kR, kP}},
       "strategy 'x': optimizer on axis 1 is Partial(avg); expected Replicate "
       "or Shard"},
      {{"x", {kR, kR}, {kP, kR}, {kR, kR}},
       "strategy 'x': gradient on axis 1 is Replicate; expected Partial or "
       "Shard"},
      {{"x", {kS}, {kP}, {kS}},
       "strategy 'x': parameter is sharded on axis 0 but gradient is "
       "Partial(avg) there; expected Shard"},
      {{"x", {kR, kR}, {kP, kS}, {kR, kR}},
       "strategy 'x': gradient is sharded on axis 1 but optimizer is Replicate "
       "there; expected Shard"},
      {{"x", {kS, kR}, {kS, kS}, {kS, kS}},
       "strategy 'x': parameter is [Shard, Replicate]; expected the sharded "
       "axes to be the innermost ones"},
      {{"x", {kR, kR}, {kS, kP}, {kS, kS}},
       "strategy 'x': gradient is [Shard, Partial(avg)]; expected the sharded"},
      {{"x", {kR, kR}, {kP, kP}, {kS, kR}},
       "strategy 'x': optimizer is [Shard, Replicate]; expected the sharded"},
  };
  for (const Refused& refused : cases) {
    SCOPED_TRACE(refused.message);
    expect_error(ErrorCode::config, refused.message, [&] {
      refused.strategy.validate();
    });
  }
}

}  // namespace
}  // namespace flatshard
