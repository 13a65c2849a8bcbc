#include "flatshard/plan/links.h"

#include "tests/plan/round_gpu.h"

#include <gtest/gtest.h>

namespace flatshard::plan {
namespace {

TEST(Group, CountsRanksOfAHost) {
  EXPECT_EQ(group_of(16, 1, 8), (Group{16, 8}));
  EXPECT_EQ(group_of(16, 1, 8).hosts(), 2);
  EXPECT_EQ(group_of(4, 1, 8), (Group{4, 4}));
  // Replicas of groups of a host: each is on another host.
  EXPECT_EQ(group_of(4, 8, 8), (Group{4, 1}));
  EXPECT_EQ(group_of(4, 8, 8).hosts(), 4);
  EXPECT_EQ(group_of(8, 2, 8), (Group{8, 4}));
}

TEST(Group, CountsRanksOfSeveralAxes) {
  // Adjacent axes are as one.
  EXPECT_EQ(group_of({{4, 4}, {4, 1}}, 8), group_of(16, 1, 8));
  // Ranks of another axis are between them.
  EXPECT_EQ(group_of({{2, 16}, {2, 1}}, 8), (Group{4, 2}));
  EXPECT_EQ(group_of({{2, 8}, {2, 4}}, 8), (Group{4, 2}));
  EXPECT_EQ(group_of({}, 8), (Group{1, 1}));
}

TEST(Links, InsideAHostTheMeasuredRateCounts) {
  const Gpu gpu = round_gpu();
  // 3/4 of 4 GB at 1 GB/s; an all-reduce goes around twice.
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_gather, 4e9, {4, 4}), 3);
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_reduce, 4e9, {4, 4}), 6);
  // And a rank's own GB.
  EXPECT_DOUBLE_EQ(copy_seconds(gpu, 4e9, {4, 4}), 3 + 1);
  EXPECT_DOUBLE_EQ(copied_reduction_seconds(gpu, 4e9, {4, 4}), 3);
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_gather, 4e9, {1, 1}), 0);
}

TEST(Links, BetweenHostsTheNetworkOfAllGpusCounts) {
  const Gpu gpu = round_gpu();
  // Half of 8 GB enters a host through 2 ports of 0.5 GB/s: 4 s; inside 3/4 of
  // it at 1 GB/s would take 6.
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_gather, 8e9, {4, 2}), 6);
  // One rank of each host: 3/4 of 8 GB through one port.
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_gather, 8e9, {4, 1}), 12);
  // A rank's own rows leave through its own port.
  EXPECT_DOUBLE_EQ(seconds(gpu, Transfer::all_to_all, 8e9, {4, 2}), 8);
}

TEST(Links, RingsHaveALatencyForEachStep) {
  Gpu gpu = round_gpu();
  gpu.network_hop_us = 10;
  gpu.nvlink_hop_us = 1;
  const double bytes = seconds(round_gpu(), Transfer::all_gather, 8e9, {16, 4});
  // 3 steps between 4 hosts and 12 inside them.
  EXPECT_NEAR(
      seconds(gpu, Transfer::all_gather, 8e9, {16, 4}) - bytes,
      (3 * 10 + 12) * 1e-6,
      1e-9);
}

}  // namespace
}  // namespace flatshard::plan
