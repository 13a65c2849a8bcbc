#include "flatshard/plan/estimate.h"

#include "flatshard/core/error.h"
#include "tests/plan/round_gpu.h"
#include "tests/plan/small_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::plan {
namespace {

std::map<std::string, std::int64_t> table_of(const Job& job) {
  std::map<std::string, std::int64_t> table;
  for (const RoleBytes& row : memory_of(job, plan_units(job))) {
    table[row.role] = row.nbytes;
  }
  return table;
}

TEST(Memory, CountsBytesByHand) {
  // 4 units of 2000 numbers on 2 ranks.
  const auto table = table_of(small_job(4, 2));
  EXPECT_EQ(table.at("main weights"), 4 * 1000 * 4);
  EXPECT_EQ(table.at("compute weights"), 4 * 1000 * 2);
  EXPECT_EQ(table.at("gradients"), 4 * 1000 * 2);
  EXPECT_EQ(table.at("optimizer state"), 4 * 1000 * 8);
  // At most 2 unsharded units and 2 gradient buffers of 4000 bytes, aligned to
  // 4096, at once.
  EXPECT_EQ(table.at("slot pool"), 4 * 4096);
}

TEST(Memory, MoreRanksHoldLess) {
  Job few = small_job(4, 2);
  Job many = few;
  many.ranks = 8;
  for (UnitShape& unit : many.units) {
    for (GroupShape& group : unit.groups) {
      group.mesh.sizes = {8};
    }
  }
  EXPECT_EQ(
      table_of(few).at("main weights"),
      4 * table_of(many).at("main weights"));
}

TEST(Estimate, CountsTokensAndFlops) {
  Job job = small_job(2, 1);
  NodeWork& node = job.layer_kinds[0].nodes[PlanNode::attend];
  node.forward.push_back(Kernel::memory("norm", 1e9));
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1e12;
  gpu.passes["sum"] = 1e12;
  const Estimate e = estimate(job, gpu);
  EXPECT_NEAR(e.step.seconds, 2, 1e-6);
  EXPECT_NEAR(e.tokens_per_second, 50, 1e-3);
  // 50 tokens/s of 1e9 FLOPs, of a peak of 2e12.
  EXPECT_NEAR(e.mfu, 0.025, 1e-6);
  EXPECT_NEAR(e.causal_mfu, 0.0125, 1e-6);
  EXPECT_EQ(e.bound, Bound::memory_bandwidth);
  EXPECT_TRUE(e.fits());
  const double hours = gpu_hours(e, 50 * 3600 * 24);
  EXPECT_NEAR(hours, 24, 1e-3);
  EXPECT_NEAR(days_of(job, hours), 1, 1e-4);
}

TEST(Estimate, DoesNotPriceWhatDoesNotFit) {
  const Job job = small_job(2, 1);
  Gpu gpu = round_gpu();
  gpu.memory_gib = 1e-6;
  const Estimate e = estimate_if_table_fits(job, gpu);
  EXPECT_FALSE(e.fits());
  EXPECT_EQ(e.step.seconds, 0);
  EXPECT_EQ(e.bound, Bound::memory);
}

TEST(Tokens, ReadSuffixes) {
  EXPECT_EQ(parse_tokens("15T"), 15e12);
  EXPECT_EQ(parse_tokens("1.5B"), 1.5e9);
  EXPECT_EQ(parse_tokens("300"), 300);
  for (const char* wrong : {"", "T", "3X", "-1B", "1BB", "inf"}) {
    EXPECT_THROW(parse_tokens(wrong), Error) << wrong;
  }
  for (const char* text : {"15T", "1.5B", "300", "20B", "7M", "2.5K"}) {
    EXPECT_EQ(tokens_text(parse_tokens(text)), text);
  }
  EXPECT_EQ(tokens_text(15000e9), "15T");
}

}  // namespace
}  // namespace flatshard::plan
