#include "flatshard/group/post_forward_shard.h"

#include "flatshard/core/error.h"
#include "tests/group/groups.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using testing::some_parameters;

std::unique_ptr<ParamGroup> make_sliced_group(
    const testing::GroupCase& c,
    std::shared_ptr<Mesh> mesh,
    std::int64_t ranks,
    Granularity granularity = {}) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = some_parameters(granularity),
          .mesh = std::move(mesh),
          .strategy =
              Strategy::named(c.strategy, static_cast<int>(c.mesh.size()))},
      ParamGroupOptions{
          .precision = Precision::full(),
          .post_forward_ranks = ranks},
      Initializer(testing::kGroupSeed));
}

// Only each rank's slice, of weights that are numbered, and all slices again.
TEST(PostForwardShard, NeighboursHaveAllSlices) {
  struct Case {
    testing::GroupCase group;
    std::int64_t ranks;
  };
  for (const Case& c : std::vector<Case>{
           {{"zero3", {4}}, 2},
           {{"zero3", {6}}, 3},
           {{"zero3", {6}}, 2},
           {{"hsdp", {2, 4}}, 2},
           {{"hfsdp", {2, 4}}, 2},
           {{"zero3", {2, 2}}, 2}}) {
    for (const Granularity& granularity :
         {Granularity(), Granularity::row(), Granularity::tensor()}) {
      run_ranks(c.group.world(), [&](RankContext& context) {
        const auto group = make_sliced_group(
            c.group,
            context.mesh(c.group.axes()),
            c.ranks,
            granularity);
        const PostForwardShard* shard = group->weights().post_forward();
        ASSERT_NE(shard, nullptr);
        const std::int64_t n = group->layout().numel();
        ASSERT_EQ(shard->numel() * c.ranks, n);
        const at::Tensor whole = at::arange(n, at::kFloat);
        const at::Tensor slice = at::full({shard->numel()}, -1.0);
        shard->save(whole, slice);
        // A group of adjacent ranks has each number once.
        const at::Tensor gathered = at::full({n}, -1.0);
        shard->gather(slice, gathered);
        EXPECT_TRUE(gathered.equal(whole));
        EXPECT_TRUE(whole.equal(at::arange(n, at::kFloat)));
        // The result has data of the adjacent ranks only.
        slice.fill_(context.rank);
        shard->gather(slice, gathered);
        EXPECT_EQ(
            gathered.min().item<double>(),
            context.rank / c.ranks * c.ranks);
        EXPECT_EQ(
            gathered.max().item<double>(),
            context.rank / c.ranks * c.ranks + c.ranks - 1);
      });
    }
  }
}

TEST(PostForwardShard, IsNoneWhereWeightsAreShardedOverNoMoreRanks) {
  for (const testing::GroupCase& c : std::vector<testing::GroupCase>{
           {"zero3", {2}},
           {"hsdp", {2, 2}},
           {"zero2", {4}},
           {"zero0", {4}}}) {
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_sliced_group(c, context.mesh(c.axes()), 2);
      EXPECT_EQ(group->weights().post_forward(), nullptr);
    });
  }
}

TEST(PostForwardShard, RefusesWhatDoesNotFit) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh();
    for (const std::int64_t ranks : {1, 3, 8, -2}) {
      EXPECT_THAT(
          message_of([&] {
            make_sliced_group({"zero3", {4}}, mesh, ranks);
          }),
          HasSubstr(fmt::format(
              "block: expected post_forward_ranks to be a divisor of the 4 "
              "ranks of the innermost axis that weights are sharded on, mesh "
              "{{dp: 4}}, and more than 1 (reshard_after_forward = false "
              "keeps full weights), got {}",
              ranks)));
    }
  });
}

}  // namespace
}  // namespace flatshard
