// Peer memory between processes: its main use.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "flatshard/mesh/mesh.h"
#include "flatshard/peer/peer_memory.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::RankOutcome;

constexpr std::int64_t kNbytes = 1 << 20;

std::unique_ptr<PeerMemory> memory_of(RankContext& context, Mesh& mesh) {
  auto memory =
      PeerMemory::create(mesh.communicator(0, Purpose::gather), kNbytes);
  memory->local().fill_(context.rank + 1);
  mesh.world().barrier();
  return memory;
}

TEST(PeerProcesses, ReadEachOther) {
  testing::run_rank_processes(3, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto memory = memory_of(context, *mesh);
    for (int rank = 0; rank < context.world; ++rank) {
      EXPECT_TRUE(memory->of(rank).eq(rank + 1).all().item<bool>());
    }
    mesh->world().barrier();
  });
}

TEST(PeerProcesses, MemoryOfADeadRankStaysReadable) {
  const auto outcomes =
      testing::rank_process_outcomes(2, [](RankContext& context) {
        const auto mesh = context.mesh();
        const auto memory = memory_of(context, *mesh);
        if (context.rank == 1) {
          ::kill(::getpid(), SIGKILL);
        }
        try {
          while (true) {
            mesh->world().barrier();
          }
        } catch (const std::exception&) {
          // It is dead.
        }
        EXPECT_TRUE(memory->of(1).eq(2).all().item<bool>());
      });
  EXPECT_EQ(outcomes[0], (RankOutcome{.exit_code = 0, .signal = 0}));
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

}  // namespace
}  // namespace flatshard
