#include "flatshard/peer/peer_communicator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "flatshard/mesh/mesh.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

// The group's own sums, rounded once, in the same order.
TEST(PeerCommunicator, ReducesToTheGroupsBits) {
  for (const int world : {2, 3}) {
    run_ranks(world, [](RankContext& context) {
      const auto plain = context.gloo("plain");
      // Rows of 256 bytes: the larger ones are split into many pieces.
      const auto copies = make_peer_communicator(
          plain,
          {.reductions_nbytes = 1,
           .stream = {.delay_seed = 5, .max_delay_us = 100}});
      EXPECT_EQ(copies->nbytes(), 2 * context.world * 256);
      EXPECT_EQ(plain->nbytes(), 0);
      auto generator = at::detail::createCPUGenerator(
          static_cast<std::uint64_t>(context.rank));
      for (const at::ScalarType dtype :
           {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong}) {
        for (const std::int64_t n : {0, 1, 63, 64, 65, 1000}) {
          const at::Tensor in =
              (at::randn({context.world * n}, generator) * 100).to(dtype);
          const at::Tensor got = at::empty({n}, dtype);
          const at::Tensor want = at::empty({n}, dtype);
          for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
            if (op == ReduceOp::avg && dtype == at::kLong) {
              continue;
            }
            copies->reduce_scatter(got, in, op);
            plain->reduce_scatter(want, in, op);
            EXPECT_TRUE(got.equal(want)) << c10::toString(dtype) << " " << n;
          }
        }
      }
      plain->barrier();
    });
  }
}

// Rows are sent as over the group itself, without its collectives.
TEST(PeerCommunicator, PassesRowsOn) {
  run_ranks(3, [](RankContext& context) {
    const auto plain = context.gloo("plain");
    plain->set_log(context.log);
    const auto peers = make_peer_communicator(plain, {});
    peers->set_log(context.log);
    // Rank r sends r rows to each.
    std::vector<RowsOfPeer> sends;
    std::vector<RowsOfPeer> receives;
    for (int peer = 0; peer < 3; ++peer) {
      sends.push_back({peer, 0, context.rank});
      receives.push_back({peer, peer == 2 ? 1 : 0, peer});
    }
    const at::Tensor out = at::zeros({3, 2});
    peers->all_to_all(
        out,
        at::full({2, 2}, context.rank, at::kFloat),
        receives,
        sends);
    EXPECT_TRUE(out.equal(
        at::tensor({1.0F, 1.0F, 2.0F, 2.0F, 2.0F, 2.0F}).view({3, 2})));
    const auto records = context.log->records();
    ASSERT_EQ(records.size(), 1);
    EXPECT_EQ(records[0].kind, CollectiveKind::all_to_all);
    EXPECT_EQ(records[0].communicator, "plain.peer");
    plain->barrier();
  });
}

// Other users of the mesh continue as before, and see nothing of it.
TEST(PeerCommunicator, BelongsToTheMeshThatAsked) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = Mesh::create(
        {{"dp", 2}},
        context.rank,
        context.store,
        at::kCPU,
        {.communicator = {.timeout = testing::kPeerTimeout},
         .log = context.log});
    const auto peers = mesh->with_communicators(
        {{{"dp"},
          make_peer_communicator(
              mesh->communicator(0, Purpose::reduce).shared_from_this(),
              {.reductions_nbytes = 1 << 10}),
          Purpose::reduce}});
    EXPECT_TRUE(peers->same_as(*mesh));
    EXPECT_GT(peers->communicator_nbytes(), 0);
    EXPECT_GT(peers->sub_mesh({"dp"})->communicator_nbytes(), 0);
    EXPECT_EQ(mesh->communicator_nbytes(), 0);
    EXPECT_EQ(
        &peers->communicator(0, Purpose::gather),
        &mesh->communicator(0, Purpose::gather));
    context.log->clear();
    const at::Tensor in = at::full({2}, context.rank + 1.0);
    const at::Tensor out = at::empty({1});
    for (Mesh* const each : {mesh.get(), peers.get()}) {
      each->communicator(0, Purpose::reduce)
          .reduce_scatter(out, in, ReduceOp::sum);
      EXPECT_EQ(out.item<float>(), 3);
    }
    std::vector<std::string> names;
    for (const CollectiveRecord& record : context.log->records()) {
      names.push_back(record.communicator);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"dp.reduce", "dp.reduce.peer"}));
    mesh->world().barrier();
  });
}

}  // namespace
}  // namespace flatshard
