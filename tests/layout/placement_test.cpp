#include "flatshard/layout/placement.h"

#include <gtest/gtest.h>

#include "tests/layout/expect_error.h"
#include "tests/layout/placements.h"

namespace flatshard {
namespace {

using testing::kP;
using testing::kR;
using testing::kS;

TEST(Placement, KnowsItsKind) {
  EXPECT_TRUE(kR.is_replicate() && !kR.is_shard() && !kR.is_partial());
  EXPECT_TRUE(!kS.is_replicate() && kS.is_shard() && !kS.is_partial());
  EXPECT_TRUE(!kP.is_replicate() && !kP.is_shard() && kP.is_partial());
  EXPECT_EQ(kP.reduce_op(), ReduceOp::avg);
}

TEST(Placement, EqualityIncludesTheReduction) {
  EXPECT_EQ(kP, Placement::partial(ReduceOp::avg));
  EXPECT_NE(kP, Placement::partial(ReduceOp::sum));
  EXPECT_NE(kR, kS);
}

TEST(Placement, OnlyPartialHasAReduction) {
  expect_error(
      ErrorCode::usage,
      "only a Partial placement has a reduction, this one is Shard",
      [] { kS.reduce_op(); });
}

TEST(Placement, Text) {
  EXPECT_EQ(
      to_string({kR, kS, kP, Placement::partial(ReduceOp::sum)}),
      "[Replicate, Shard, Partial(avg), Partial(sum)]");
  EXPECT_EQ(to_string(Placements{}), "[]");
}

TEST(Placements, ShardedAxes) {
  EXPECT_EQ(num_sharded_axes({kS, kR, kS}), 2);
  EXPECT_TRUE(shards_are_suffix({}));
  EXPECT_TRUE(shards_are_suffix({kR, kP}));
  EXPECT_TRUE(shards_are_suffix({kR, kS}));
  EXPECT_TRUE(shards_are_suffix({kS, kS}));
  EXPECT_FALSE(shards_are_suffix({kS, kR}));
  EXPECT_FALSE(shards_are_suffix({kS, kP, kS}));
}

}  // namespace
}  // namespace flatshard
