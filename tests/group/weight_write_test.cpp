#include "flatshard/group/weight_write.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "tests/group/groups.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard::testing {
namespace {

std::int64_t num_fences(const CollectiveLog& log) {
  const auto records = log.records();
  return std::count_if(records.begin(), records.end(), [](const auto& record) {
    return record.kind == CollectiveKind::fence;
  });
}

// This is the state after an evaluation: peers copied in its all-gathers, and
// no reduction followed.
TEST(WeightWrite, WaitsOnceForPeersThatCopied) {
  run_ranks(2, [](RankContext& context) {
    context.log = std::make_shared<CollectiveLog>();
    const auto mesh = context.mesh();
    ParamGroup group(
        {.parameters = some_parameters(),
         .mesh = mesh,
         .strategy = Strategy::named("zero3", 1),
         .peers_read = true},
        {.precision = {.reduce = at::kBFloat16}},
        Initializer(kGroupSeed));
    const auto stream = current_stream(at::kCPU);
    const auto fences_of_a_write = [&] {
      context.log->clear();
      WeightWrite write({&group}, *stream);
      group.weights().main().local().add_(1);
      write.end(group, WeightWrite::Cast::here);
      return num_fences(*context.log);
    };
    EXPECT_EQ(fences_of_a_write(), 0);  // nobody read
    const at::Tensor out = at::empty({group.layout().numel()}, at::kBFloat16);
    group.weights().gather(
        kComputePlane,
        kWhole,
        out,
        group.weights().plan_gather(/*from_peers=*/true));
    EXPECT_EQ(fences_of_a_write(), 1);
    EXPECT_EQ(fences_of_a_write(), 0);
    group.weights().gather(
        kComputePlane,
        kWhole,
        out,
        group.weights().plan_gather(/*from_peers=*/true));
    group.gradients().reduce(
        at::zeros({group.layout().numel()}, at::kBFloat16),
        group.plan_reduction(true, true));
    EXPECT_EQ(fences_of_a_write(), 0);  // the reduction marked it
    mesh->world().barrier();
  });
}

TEST(WeightWrite, EachOneIsAVersionThatTheOtherPlanesHave) {
  run_ranks(1, [](RankContext& context) {
    ParamGroup group(
        {.parameters = some_parameters(),
         .mesh = context.mesh(),
         .strategy = Strategy::named("zero3", 1)},
        {},
        Initializer(kGroupSeed));
    WeightPlanes& weights = group.weights();
    const auto stream = current_stream(at::kCPU);
    ASSERT_EQ(weights.planes().size(), 1);
    const at::Tensor compute = weights.planes()[0].resting.local();
    std::int64_t version = weights.version();
    {
      WeightWrite write({&group}, *stream);
      weights.main().local().fill_(3);
      write.end(group, WeightWrite::Cast::here);
      EXPECT_NE(
          message_of([&] {
            write.end(group, WeightWrite::Cast::here);
          }).find("was not being written, or its write has ended"),
          std::string::npos);
    }
    EXPECT_EQ(weights.version(), version + 1);
    EXPECT_TRUE(compute.eq(3).all().item<bool>());
    EXPECT_FALSE(weights.adopt_foreign_writes());

    // The write first adopts writes by others: the plane has its own version.
    weights.main().local().fill_(4);
    version = weights.version();
    try {
      WeightWrite write({&group}, *stream);
      EXPECT_TRUE(compute.eq(4).all().item<bool>());
      throw std::runtime_error("in mid-write");
    } catch (const std::runtime_error&) {}
    EXPECT_EQ(weights.version(), version + 2);
  });
}

}  // namespace
}  // namespace flatshard::testing
