#include "flatshard/mesh/mesh.h"
#include "flatshard/mesh/token_part.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/mesh/on_all_ranks.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

// Returns the mesh ranks of the group, in its order, as its own all-gather sees
// them.
std::vector<int> members(Communicator& group, int mesh_rank) {
  const at::Tensor all = at::empty({group.size()}, at::kInt);
  group.all_gather(all, at::full({1}, mesh_rank, at::kInt));
  return {all.data_ptr<int>(), all.data_ptr<int>() + all.numel()};
}

TEST(Mesh, SingleNeverCommunicates) {
  const auto mesh = Mesh::single(at::kCPU, "dp");
  EXPECT_EQ(mesh->rank(), 0);
  EXPECT_EQ(mesh->size(), 1);
  EXPECT_EQ(mesh->to_string(), "{dp: 1}");
  const at::Tensor value = at::full({3}, 2.0);
  mesh->world().all_reduce(value, ReduceOp::avg);
  EXPECT_TRUE(value.equal(at::full({3}, 2.0)));
  EXPECT_EQ(mesh->communicator(0, Purpose::gather).name(), "dp.gather");
}

// A rank that has its mesh may leave: the others must be connected by then.
TEST(Mesh, RanksMayLeaveAsSoonAsTheyHaveIt) {
  for (int round = 0; round < 60; ++round) {
    EXPECT_NO_THROW(run_ranks(3, [](RankContext& context) {
      context.make_communicator = {};  // Gloo
      EXPECT_EQ(context.mesh()->size(), 3);
    }));
  }
}

TEST(Mesh, CoordinatesAndGroupsOfTwoAxes) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 2}, {"dp", 4}});
    const int outer = context.rank / 4;
    const int inner = context.rank % 4;
    EXPECT_EQ(mesh->rank(), context.rank);
    EXPECT_EQ(mesh->coordinate("outer"), outer);
    EXPECT_EQ(mesh->coordinate(1), inner);
    EXPECT_EQ(mesh->size(), 8);
    for (const Purpose purpose : {Purpose::gather, Purpose::reduce}) {
      auto& dp = mesh->communicator(1, purpose);
      EXPECT_EQ(
          members(dp, context.rank),
          (std::vector<int>{
              outer * 4,
              outer * 4 + 1,
              outer * 4 + 2,
              outer * 4 + 3}));
      auto& replicate = mesh->communicator(0, purpose);
      EXPECT_EQ(
          members(replicate, context.rank),
          (std::vector<int>{inner, inner + 4}));
      // Shard order: the inner coordinate counts most.
      EXPECT_EQ(
          members(mesh->world(purpose), context.rank),
          (std::vector<int>{0, 4, 1, 5, 2, 6, 3, 7}));
      EXPECT_EQ(mesh->world(purpose).rank(), inner * 2 + outer);
    }
    const int both[] = {0, 1};
    EXPECT_EQ(mesh->group_index(both), inner * 2 + outer);
    EXPECT_EQ(mesh->group_size(both), 8);
    EXPECT_NE(
        &mesh->communicator(1, Purpose::gather),
        &mesh->communicator(1, Purpose::reduce));
    EXPECT_EQ(mesh->world(Purpose::gather).name(), "outer+dp.gather");
  });
}

TEST(Mesh, AxesOfSizeOneShareTheGroupOfTheRest) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 1}, {"dp", 2}});
    EXPECT_EQ(
        &mesh->world(Purpose::gather),
        &mesh->communicator(1, Purpose::gather));
    EXPECT_EQ(mesh->communicator(0, Purpose::gather).size(), 1);
  });
}

TEST(Mesh, ThreeAxesMakeOtherGroupsOnDemand) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.mesh({{"pp", 2}, {"outer", 2}, {"dp", 2}});
    const int inner_two[] = {1, 2};
    auto& group = mesh->communicator(inner_two, Purpose::reduce);
    const int base = context.rank / 4 * 4;
    EXPECT_EQ(
        members(group, context.rank),
        (std::vector<int>{base, base + 2, base + 1, base + 3}));
    EXPECT_EQ(&mesh->communicator(inner_two, Purpose::reduce), &group);
    const int outer_two[] = {0, 1};
    const int dp = context.rank % 2;
    EXPECT_EQ(
        members(mesh->communicator(outer_two, Purpose::reduce), context.rank),
        (std::vector<int>{dp, dp + 4, dp + 2, dp + 6}));
  });
}

TEST(Mesh, SubMeshSharesGroups) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"pp", 2}, {"dp", 2}});
    const auto dp = mesh->sub_mesh({"dp"});
    EXPECT_EQ(dp->to_string(), "{dp: 2}");
    EXPECT_EQ(dp->rank(), context.rank % 2);
    EXPECT_EQ(
        &dp->world(Purpose::reduce),
        &mesh->communicator(1, Purpose::reduce));
    EXPECT_TRUE(dp->same_as(*mesh->sub_mesh({"dp"})));
    EXPECT_FALSE(dp->same_as(*mesh));
    EXPECT_TRUE(mesh->sub_mesh({"dp", "pp"})->same_as(*mesh));
  });
}

TEST(Mesh, DataMeshHasTheAxesAlongWhichSamplesDiffer) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh =
        context.mesh({{"replicate", 2}, {"dp", 2}, {"tp", 2, AxisRole::model}});
    const auto data = mesh->data_mesh();
    EXPECT_EQ(data->to_string(), "{replicate: 2, dp: 2}");
    EXPECT_EQ(data->size(), 4);
    EXPECT_EQ(data->rank(), context.rank / 2);
    const int tp = context.rank % 2;
    // In shard order: the innermost axis is split first.
    EXPECT_EQ(
        members(data->world(), mesh->rank()),
        (std::vector{tp, 4 + tp, 2 + tp, 6 + tp}));
  });
  EXPECT_THAT(
      message_of([] {
        Mesh::create({{"tp", 1, AxisRole::model}}, 0, {}, at::kCPU)
            ->data_mesh();
      }),
      HasSubstr("expected an axis along which ranks read different samples"));
}

TEST(Mesh, TokenMeshHasTheAxesAlongWhichTokensDiffer) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.mesh(
        {{"dp", 2}, {"cp", 2, AxisRole::sequence}, {"tp", 2, AxisRole::model}});
    EXPECT_EQ(mesh->data_mesh()->to_string(), "{dp: 2}");
    const auto tokens = mesh->token_mesh();
    EXPECT_EQ(tokens->to_string(), "{dp: 2, cp: 2}");
    EXPECT_EQ(tokens->rank(), context.rank / 2);
    for (const auto& of : {mesh, tokens}) {
      const TokenPart part = token_part(*of);
      EXPECT_EQ(part.rank, context.rank / 2 % 2);
      EXPECT_EQ(part.ranks, 2);
      EXPECT_EQ(part.hosts, 1);
    }
    EXPECT_EQ(token_part(*mesh->data_mesh()).num_parts(), 1);
  });
}

TEST(Mesh, NeighboursOfAnAxisAreAGroup) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 2}, {"dp", 4}});
    for (const int size : {1, 2, 4}) {
      Communicator& group = mesh->neighbours(1, size, Purpose::gather);
      std::vector<int> expected(static_cast<std::size_t>(size));
      std::iota(expected.begin(), expected.end(), context.rank / size * size);
      EXPECT_EQ(members(group, context.rank), expected);
      EXPECT_EQ(&mesh->neighbours(1, size, Purpose::gather), &group);
      EXPECT_EQ(
          &mesh->sub_mesh({"dp"})->neighbours(0, size, Purpose::gather),
          &group);
    }
    const auto known = mesh->communicators(Purpose::gather);
    EXPECT_NE(
        std::find(
            known.begin(),
            known.end(),
            &mesh->neighbours(1, 2, Purpose::gather)),
        known.end());
    // Other ranks of the axis are another group.
    const int own = context.rank % 2;
    EXPECT_EQ(
        members(mesh->neighbours(1, 2, Purpose::reduce), context.rank)[own],
        context.rank);
    EXPECT_THAT(
        message_of([&] { mesh->neighbours(1, 3, Purpose::gather); }),
        HasSubstr("expected a divisor of the 4 ranks of axis 'dp' for groups "
                  "of adjacent ranks, got 3"));
  });
}

TEST(OnAllRanks, ReturnsTheResultOfRank0) {
  run_ranks(3, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto found =
        on_all_ranks(*mesh, "find", [&] { return 7 + context.rank; });
    EXPECT_EQ(found, 7);
  });
}

TEST(OnAllRanks, FailsOnAllIfItFailsOnOne) {
  for (const int failing : {0, 2}) {
    run_ranks(3, [&](RankContext& context) {
      const auto mesh = context.mesh();
      const std::string text = message_of([&] {
        on_all_ranks(*mesh, "find", [&]() -> std::int64_t {
          FLATSHARD_CHECK(context.rank != failing, io, "no such file");
          return 1;
        });
      });
      EXPECT_THAT(
          text,
          HasSubstr(
              context.rank == failing
                  ? "no such file"
                  : fmt::format(
                        "find: rank {} failed, and therefore all ranks",
                        failing)));
      // The mesh still works.
      EXPECT_EQ(on_all_ranks(*mesh, "find", [] { return 2; }), 2);
    });
  }
}

TEST(Mesh, TwoMeshesOverOneStore) {
  run_ranks(2, [](RankContext& context) {
    const auto a = context.mesh({{"dp", 2}}, "a");
    const auto b = context.mesh({{"dp", 2}}, "b");
    EXPECT_FALSE(a->same_as(*b));
    b->world().barrier();
    a->world().barrier();
  });
}

TEST(Mesh, RefusesByName) {
  const auto create =
      [](std::vector<MeshAxis> axes, int rank, at::Device device = at::kCPU) {
        return message_of([&] { Mesh::create(axes, rank, {}, device); });
      };
  EXPECT_THAT(create({}, 0), HasSubstr("at least one axis"));
  EXPECT_THAT(
      create({{"dp", 2}, {"dp", 2}}, 0),
      HasSubstr("mesh {dp: 2, dp: 2}: expected axis names that are not empty "
                "and differ, got 'dp'"));
  EXPECT_THAT(
      create({{"dp", 0}}, 0),
      HasSubstr("expected size >= 1 for axis 'dp', got 0"));
  EXPECT_THAT(
      create({{"dp", 2}}, 2),
      HasSubstr("expected a rank below 2, got 2"));
  EXPECT_THAT(create({{"dp", 2}}, 0), HasSubstr("expected a store"));
  EXPECT_THAT(
      create({{"dp", 1}}, 0, at::kCUDA),
      HasSubstr("expected a GPU with an index such as cuda:0, got 'cuda'"));

  const auto mesh = Mesh::create({{"outer", 1}, {"dp", 1}}, 0, {}, at::kCPU);
  EXPECT_THAT(
      message_of([&] { mesh->axis_index("tp"); }),
      HasSubstr("mesh {outer: 1, dp: 1} has no axis 'tp'"));
  const int descending[] = {1, 0};
  EXPECT_THAT(
      message_of([&] { mesh->communicator(descending, Purpose::gather); }),
      HasSubstr("expected ascending axes below 2, got axis 0"));
  EXPECT_THAT(
      message_of([&] { mesh->communicator(2, Purpose::gather); }),
      HasSubstr("got axis 2"));
  EXPECT_THAT(message_of([&] { mesh->sub_mesh({}); }), HasSubstr("needs axes"));
  EXPECT_THAT(
      message_of([&] {
        mesh->sub_mesh({"dp", "dp"});
      }),
      HasSubstr("names each axis once"));
}

}  // namespace
}  // namespace flatshard
