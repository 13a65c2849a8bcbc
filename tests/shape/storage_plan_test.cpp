#include "flatshard/shape/storage_plan.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace flatshard {
namespace {

using Sizes = std::vector<std::int64_t>;

GroupShape shape_of(const std::string& strategy, const Sizes& sizes) {
  GroupShape shape;
  shape.strategy = Strategy::named(strategy, static_cast<int>(sizes.size()));
  shape.mesh.sizes = sizes;
  shape.mesh.model_ranks = shape.mesh.num_ranks();
  return shape;
}

/// Returns the shapes of all strategies on meshes, also with adjacent ranks.
std::vector<GroupShape> shapes() {
  std::vector<GroupShape> all;
  for (const StrategyName& row : strategy_names()) {
    for (const Sizes& sizes : {Sizes{1}, {2}, {1, 1}, {1, 2}, {2, 1}, {2, 2}}) {
      if (row.needs_outer_axis() && sizes.size() == 1) {
        continue;
      }
      // The group's mesh is the mesh of the model, or all but its inner axis.
      for (const std::int64_t more : {1, 2}) {
        GroupShape shape = shape_of(std::string(row.name), sizes);
        shape.mesh.model_ranks *= more;
        all.push_back(shape);
      }
    }
  }
  return all;
}

/// Returns the shape with every combination of options.
std::vector<GroupShape> with_options(const GroupShape& shape) {
  std::vector<GroupShape> all;
  for (int bits = 0; bits < 1 << 6; ++bits) {
    GroupShape one = shape;
    const auto bit = [&](int i) { return (bits >> i & 1) != 0; };
    one.trainable = bit(0);
    one.keep_compute_weights = bit(1);
    one.offload = bit(2);
    one.has_weights = bit(3);
    one.main_has_compute_dtype = bit(4) || !one.trainable;
    if (bit(5)) {
      one.float8 = Float8Shape{};
    }
    all.push_back(one);
  }
  return all;
}

// Everything that a rank can store of a group, and no other combination of
// StoragePlan's values. A new line here is a new case for WeightPlanes.
TEST(StoragePlan, TableOfCombinations) {
  std::set<std::string> weights;
  std::set<std::string> gradients;
  for (const GroupShape& shape : shapes()) {
    for (const GroupShape& one : with_options(shape)) {
      StoragePlan plan = storage_plan(one);
      StoragePlan gradient{.outer = plan.outer, .sums_inner = plan.sums_inner};
      gradients.insert(to_string(gradient));
      plan.outer = StoragePlan::Outer::together;
      plan.sums_inner = false;
      weights.insert(to_string(plan));
    }
  }
  const auto lines = [](const std::set<std::string>& of) {
    std::string text;
    for (const std::string& line : of) {
      text += line + "\n";
    }
    return text;
  };
  EXPECT_EQ(lines(weights), R"(main is compute, planes sharded
main is compute, planes sharded, spread
main is compute, planes unsharded
main is compute, planes unsharded, spread
main on device, planes made
main on device, planes made, encoded
main on device, planes sharded
main on device, planes sharded, encoded
main on device, planes sharded, spread
main on device, planes sharded, spread, encoded
main on device, planes unsharded
main on device, planes unsharded, encoded
main on device, planes unsharded, spread
main on device, planes unsharded, spread, encoded
main on host, planes made
main on host, planes made, encoded
main on host, planes sharded
main on host, planes sharded, encoded
main on host, planes sharded, spread
main on host, planes sharded, spread, encoded
main on host, planes unsharded
main on host, planes unsharded, encoded
main on host, planes unsharded, spread
main on host, planes unsharded, spread, encoded
no weights
)");
  EXPECT_EQ(lines(gradients), R"(no weights
no weights, inner sums
no weights, inner sums, outer axis after the inner ones
no weights, inner sums, outer axis only
no weights, outer axis only
)");
}

TEST(StoragePlan, NothingIsSpreadOrMadeWhereEveryRankHasAll) {
  for (const GroupShape& shape : shapes()) {
    for (const GroupShape& one : with_options(shape)) {
      const StoragePlan plan = storage_plan(one);
      if (!one.has_weights) {
        EXPECT_EQ(plan.main, StoragePlan::Main::absent);
        EXPECT_FALSE(plan.has_refresh());
        continue;
      }
      EXPECT_EQ(plan.encodes, one.float8.has_value());
      EXPECT_EQ(plan.main == StoragePlan::Main::host, one.offload);
      if (!plan.rests()) {
        EXPECT_FALSE(plan.spreads || plan.main_is_compute()) << to_string(plan);
        EXPECT_FALSE(one.keep_compute_weights);
      }
      if (one.mesh.num_ranks() == 1) {
        EXPECT_FALSE(plan.spreads) << to_string(plan);
      }
    }
  }
}

// Experts with one rank on the inner axis have such groups. They are reduced
// once in a step.
TEST(StoragePlan, AGroupOnTheOuterAxisAloneIsReducedOnItsStream) {
  GroupShape shape = shape_of("hsdp", {2, 1});
  EXPECT_EQ(storage_plan(shape).outer, StoragePlan::Outer::together);
  shape.mesh.model_ranks = 4;
  EXPECT_EQ(storage_plan(shape).outer, StoragePlan::Outer::alone);
  EXPECT_TRUE(storage_plan(shape).sums_inner);
  shape.trainable = false;
  EXPECT_FALSE(storage_plan(shape).has_outer_stage());
  EXPECT_FALSE(storage_plan(shape).sums_inner);
  shape.trainable = true;
  shape.mesh.has_outer_axis = false;
  EXPECT_FALSE(storage_plan(shape).has_outer_stage());
}

TEST(StoragePlan, TheOuterStageFollowsTheInnerOne) {
  const auto outer = [](const std::string& strategy) {
    return storage_plan(shape_of(strategy, {2, 2})).outer;
  };
  EXPECT_EQ(outer("hsdp"), StoragePlan::Outer::after);
  EXPECT_EQ(outer("hfsdp"), StoragePlan::Outer::after);
  EXPECT_EQ(outer("hsdp_zero1"), StoragePlan::Outer::after);
  // One reduce-scatter over all ranks.
  EXPECT_EQ(outer("zero1"), StoragePlan::Outer::together);
  EXPECT_EQ(outer("zero3"), StoragePlan::Outer::together);
  EXPECT_EQ(outer("zero0"), StoragePlan::Outer::together);
}

}  // namespace
}  // namespace flatshard
