#include "flatshard/peer/peer_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "flatshard/mesh/mesh.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

TEST(PeerMemory, APeerReadsWhatWasWrittenBeforeTheFence) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [](RankContext& context) {
      const auto mesh = context.mesh();
      Communicator& group = mesh->communicator(0, Purpose::gather);
      constexpr std::int64_t kNbytes = 5000;
      const auto memory = PeerMemory::create(group, kNbytes);
      ASSERT_EQ(memory->size(), context.world);
      ASSERT_EQ(memory->rank(), context.rank);
      for (int rank = 0; rank < context.world; ++rank) {
        ASSERT_EQ(memory->of(rank).numel(), kNbytes);
        EXPECT_EQ(memory->of(rank).count_nonzero().item<int>(), 0);
      }
      group.barrier();  // all have looked
      for (int round = 1; round <= 20; ++round) {
        memory->local().fill_(10 * context.rank + round);
        group.barrier();
        for (int rank = 0; rank < context.world; ++rank) {
          EXPECT_TRUE(memory->of(rank).eq(10 * rank + round).all().item<bool>())
              << "of rank " << rank << " in round " << round;
        }
        group.barrier();  // before the next round overwrites it
      }
    });
  }
}

TEST(PeerMemory, NoBytesAtAll) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto memory =
        PeerMemory::create(mesh->communicator(0, Purpose::gather), 0);
    EXPECT_EQ(memory->of(1 - context.rank).numel(), 0);
  });
}

}  // namespace
}  // namespace flatshard
