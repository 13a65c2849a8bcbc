#include "flatshard/shape/group_plan.h"
#include "flatshard/shape/unit_plan.h"

#include "flatshard/schedule/slot_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

/// Returns a group of matrices [64, 32] on a mesh, with sizes of bfloat16
/// compute.
GroupShape matrices(
    const std::string& strategy,
    const std::vector<std::int64_t>& sizes,
    int num = 2) {
  GroupShape shape;
  for (int i = 0; i < num; ++i) {
    shape.tensors.push_back(
        {.name = "w" + std::to_string(i), .shape = {64, 32}});
  }
  shape.strategy = Strategy::named(strategy, static_cast<int>(sizes.size()));
  shape.mesh.sizes = sizes;
  shape.mesh.strides.assign(sizes.size(), 1);
  shape.mesh.model_ranks = shape.mesh.num_ranks();
  return shape;
}

GroupShape rowwise(GroupShape shape, bool stored_columns) {
  Float8Shape float8{
      .recipe = "rowwise",
      .stored_columns = stored_columns,
      .scales_behind_columns = true};
  for (std::size_t i = 0; i < shape.tensors.size(); ++i) {
    TensorSpec& tensor = shape.tensors[i];
    tensor.granularity = Granularity::row();
    tensor.part = static_cast<std::int64_t>(i);
    float8.scale_offsets.push_back({float8.num_scales, float8.num_scales});
    float8.num_scales += 64;
  }
  shape.float8 = float8;
  return shape;
}

constexpr std::int64_t kNumel = 2 * 64 * 32;

TEST(GroupPlan, BytesOfTheStrategies) {
  struct Case {
    std::string strategy;
    std::vector<std::int64_t> sizes;
    std::int64_t main, compute, gradients, inner;
  };
  for (const Case& c : std::vector<Case>{
           {"zero0", {2}, 4 * kNumel, 2 * kNumel, 4 * kNumel, 4 * kNumel},
           {"zero1", {2}, 2 * kNumel, 2 * kNumel, 2 * kNumel, 4 * kNumel},
           {"zero2", {2}, 2 * kNumel, 2 * kNumel, 2 * kNumel, 0},
           {"zero3", {2}, 2 * kNumel, kNumel, 2 * kNumel, 0},
           {"hsdp", {2, 2}, 2 * kNumel, kNumel, 2 * kNumel, 2 * kNumel},
           {"hfsdp", {2, 2}, kNumel, kNumel, kNumel, 2 * kNumel},
       }) {
    const GroupBytes bytes = GroupPlan(matrices(c.strategy, c.sizes)).bytes();
    EXPECT_EQ(bytes.main, c.main) << c.strategy;
    EXPECT_EQ(bytes.compute, c.compute) << c.strategy;
    EXPECT_EQ(bytes.gradients, c.gradients) << c.strategy;
    EXPECT_EQ(bytes.inner, c.inner) << c.strategy;
    EXPECT_EQ(bytes.local, 4 * kNumel) << c.strategy;
    EXPECT_EQ(bytes.numel, c.main / 4) << c.strategy;
  }
}

TEST(GroupPlan, WhatHasNoMemoryHasNoBytes) {
  GroupShape shape = matrices("zero3", {2});
  shape.keep_compute_weights = false;
  EXPECT_EQ(GroupPlan(shape).bytes().compute, 0);
  shape.keep_compute_weights = true;
  shape.main_has_compute_dtype = true;
  shape.sizes.main = 2;
  EXPECT_EQ(GroupPlan(shape).bytes().main, 0);
  shape.has_weights = false;
  const GroupPlan none(shape);
  EXPECT_EQ(none.bytes().main, 0);
  EXPECT_EQ(none.bytes().compute, 0);
  EXPECT_FALSE(none.has(kComputePlane));
  EXPECT_TRUE(none.storage.resident());
}

TEST(GroupPlan, Float8HasRowsAndColumns) {
  for (const bool stored : {false, true}) {
    const GroupPlan plan(rowwise(matrices("zero3", {2}), stored));
    ASSERT_EQ(plan.planes.size(), 3U);
    EXPECT_FALSE(plan.has(kComputePlane));
    const PlaneShape& rows = plan.planes[1];
    const PlaneShape& columns = plan.planes[2];
    EXPECT_TRUE(rows.stored() && rows.on_request && rows.in_forward);
    EXPECT_EQ(columns.stored(), stored);
    EXPECT_EQ(rows.whole.nbytes, kNumel);
    // A scale of four bytes for each of 32 columns of both weights.
    EXPECT_EQ(columns.whole.nbytes, kNumel + (stored ? 0 : 2 * 32 * 4));
    EXPECT_EQ(rows.parts.size(), 2U);
    EXPECT_EQ(rows.parts[1].first_parameter, 1);
    EXPECT_EQ(rows.parts[1].offset, rows.parts[0].layout->numel());
    EXPECT_EQ(plan.bytes().compute, (stored ? 2 : 1) * kNumel / 2 + 2 * 64 * 4);
  }
}

TEST(GroupPlan, FrozenFloat8MayDropMainWeights) {
  GroupShape shape = rowwise(matrices("zero3", {2}), false);
  shape.trainable = false;
  shape.sizes.main = 2;
  EXPECT_EQ(GroupPlan(shape).bytes().main, 0);
  shape.keep_compute_weights = false;
  EXPECT_EQ(GroupPlan(shape).bytes().main, kNumel);
}

TEST(GroupPlan, AShardFromForwardToBackwardOfFewerRanks) {
  GroupShape shape = matrices("zero3", {4});
  shape.post_forward_ranks = 2;
  EXPECT_EQ(GroupPlan(shape).post_forward_numel(), kNumel / 2);
  shape.post_forward_ranks = 4;  // the stored shard
  EXPECT_FALSE(GroupPlan(shape).has_post_forward());
  EXPECT_EQ(GroupPlan(shape).post_forward_numel(), 0);
}

TEST(UnitPlan, GroupsFollowEachOtherInSlots) {
  GroupShape odd = matrices("zero3", {2}, 1);
  odd.tensors[0].shape = {3};
  GroupShape frozen = matrices("zero3", {2}, 1);
  frozen.trainable = false;
  const std::vector<GroupPlan> plans{GroupPlan(odd), GroupPlan(frozen)};
  const std::vector<const GroupPlan*> groups{&plans[0], &plans[1]};
  const UnitLayout layout("unit", groups);
  EXPECT_EQ(layout.offsets[kComputePlane][1], SlotPlan::kAlignment);
  EXPECT_EQ(
      layout.slots.weights_nbytes[kComputePlane],
      SlotPlan::kAlignment + 64 * 32 * 2);
  EXPECT_EQ(layout.slots.grad_nbytes, SlotPlan::kAlignment);
  EXPECT_TRUE(layout.slots.reduce_every_microbatch);
  EXPECT_FALSE(layout.slots.resident);
}

// The scheduler all-gathers resident weights where that spreads them, without a
// buffer.
TEST(UnitPlan, SpreadWeightsAreGatheredWithoutASlot) {
  const UnitPlan unit({.name = "unit", .groups = {matrices("zero1", {2})}});
  EXPECT_TRUE(unit.spec.resident);
  EXPECT_EQ(unit.spec.weights_nbytes[kComputePlane], 2 * kNumel);
  const UnitPlan whole({.name = "unit", .groups = {matrices("zero0", {2})}});
  EXPECT_TRUE(whole.spec.resident);
  EXPECT_EQ(whole.spec.weights_nbytes[kComputePlane], 0);
}

TEST(UnitPlan, PartsAreThePartsOfAllGroups) {
  const GroupShape two = rowwise(matrices("zero3", {2}), false);
  const UnitPlan unit({.name = "unit", .groups = {two, two}});
  EXPECT_EQ(unit.spec.num_parts(1), 4);
  EXPECT_EQ(unit.spec.num_parts(2), 4);
  EXPECT_TRUE(unit.spec.transient.contains(2));
  // A single part covers everything.
  const GroupShape one = rowwise(matrices("zero3", {2}, 1), false);
  EXPECT_EQ(UnitPlan({.name = "unit", .groups = {one}}).spec.num_parts(1), 0);
}

}  // namespace
}  // namespace flatshard
