#include "flatshard/peer/page_communicator.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

std::shared_ptr<Communicator> connect_group(const RankContext& context) {
  return context.gloo("ep");
}

// A half is overwritten two rounds later, and by then all have read it, however
// slow a rank is.
TEST(PageCommunicator, EveryRoundGivesItsOwnNumbers) {
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [](RankContext& context) {
      const auto group = connect_group(context);
      const auto pages = make_page_communicator(group, {.max_nbytes = 48});
      std::mt19937 random(static_cast<unsigned>(context.rank));
      for (int round = 0; round < 500; ++round) {
        const std::int64_t n = round % 7;
        const at::Tensor mine = at::full({n}, 10.0F * round + context.rank);
        const at::Tensor all = at::empty({context.world, n});
        if (random() % 50 == 0) {
          std::this_thread::yield();
        }
        pages->all_gather(all, mine);
        for (int rank = 0; rank < context.world; ++rank) {
          EXPECT_TRUE(all[rank].eq(10.0F * round + rank).all().item<bool>())
              << "of rank " << rank << " in round " << round;
        }
      }
      group->barrier();
    });
  }
}

TEST(PageCommunicator, ARankThatDoesNotComeIsNamed) {
  run_ranks(2, [](RankContext& context) {
    const auto group = connect_group(context);
    const auto pages = make_page_communicator(
        group,
        {.timeout = std::chrono::milliseconds(50)});
    if (context.rank == 0) {
      EXPECT_THAT(
          message_of([&] { pages->all_gather(at::empty({2}), at::ones({1})); }),
          AllOf(
              HasSubstr("rank 0/2 | ep.pages | all_gather"),
              HasSubstr("rank 1 of the group did not arrive within 50 ms")));
    }
    group->barrier();
  });
}

// The watcher ends waiting ranks, from a separate thread.
TEST(PageCommunicator, AnAbortEndsTheWait) {
  run_ranks(2, [](RankContext& context) {
    const auto group = connect_group(context);
    const auto pages = make_page_communicator(group);
    if (context.rank == 0) {
      std::thread watcher([&] { pages->abort(); });
      EXPECT_THAT(
          message_of([&] { pages->all_gather(at::empty({2}), at::ones({1})); }),
          HasSubstr("it was aborted"));
      watcher.join();
    }
    group->barrier();
  });
}

TEST(PageCommunicator, RanksAtDifferentRoundsBeginAnew) {
  run_ranks(2, [](RankContext& context) {
    const auto group = connect_group(context);
    const auto timeout = std::chrono::milliseconds(500);
    const auto pages = context.rank == 0
                           ? make_page_communicator(group, {.timeout = timeout})
                           : make_page_communicator(group);
    const at::Tensor all = at::empty({2});
    if (context.rank == 0) {
      EXPECT_THAT(
          message_of([&] { pages->all_gather(all, at::full({1}, 7.0F)); }),
          HasSubstr("did not arrive"));
    }
    group->barrier();
    pages->restart();
    pages->all_gather(all, at::full({1}, 5.0F + context.rank));
    EXPECT_TRUE(all.equal(at::tensor({5.0F, 6.0F})));
    group->barrier();
  });
}

TEST(PageCommunicator, RefusesByName) {
  run_ranks(2, [](RankContext& context) {
    const auto group = connect_group(context);
    const auto pages = make_page_communicator(group, {.max_nbytes = 4});
    EXPECT_THAT(
        message_of([&] { pages->all_gather(at::empty({4}), at::ones({2})); }),
        HasSubstr("expected at most 4 bytes of each rank, got 8"));
    EXPECT_THAT(
        message_of([&] { pages->all_reduce(at::ones({1}), ReduceOp::sum); }),
        HasSubstr("communicator 'ep.pages' uses the hosts' shared pages: it "
                  "supports only all-gathers"));
    const std::int64_t n = 1 + context.rank;
    EXPECT_THAT(
        message_of([&] {
          pages->all_gather(
              at::empty({2 * n}, at::kChar),
              at::ones({n}, at::kChar));
        }),
        HasSubstr(fmt::format(
            "rank {} of the group sends {} bytes, this rank {}",
            1 - context.rank,
            2 - context.rank,
            n)));
  });
}

}  // namespace
}  // namespace flatshard
