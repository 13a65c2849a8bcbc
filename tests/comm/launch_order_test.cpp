// Which collective of a group a rank launches next, when several streams have
// some.
#include "flatshard/comm/launch_order.h"

#include "flatshard/core/error.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::run_ranks;

const at::Device kCpu(at::kCPU);

std::shared_ptr<Stream> slow_stream(const char* name, int rank) {
  return make_stream(
      kCpu,
      name,
      {.delay_seed = static_cast<std::uint64_t>(rank) + 1,
       .max_delay_us = 2000});
}

// Otherwise, ranks whose streams are late in turn would add up the values of
// different calls, or wait for each other forever.
TEST(LaunchOrder, StreamsLaunchAsTheyWereQueued) {
  constexpr int kRanks = 3;
  run_ranks(kRanks, [](RankContext& context) {
    const auto mesh = context.mesh();
    Communicator* const group = &mesh->world();
    const std::vector<std::shared_ptr<Stream>> streams{
        slow_stream("a", context.rank),
        slow_stream("b", context.rank + kRanks)};
    std::vector<at::Tensor> sums;
    for (int i = 0; i < 40; ++i) {
      const at::Tensor sum = at::full({1}, i);
      sums.push_back(sum);
      queue_collectives(*streams[i % 2], {&group, 1}, [group, sum] {
        group->all_reduce(sum, ReduceOp::sum);
      });
      if (i % 7 == 0) {  // the host's own come after those
        const at::Tensor own = at::full({1}, 100 + i);
        group->all_reduce(own, ReduceOp::sum);
        EXPECT_EQ(own.item<int>(), kRanks * (100 + i));
      }
    }
    for (const auto& stream : streams) {
      stream->synchronize();
    }
    for (int i = 0; i < 40; ++i) {
      EXPECT_EQ(sums[static_cast<std::size_t>(i)].item<int>(), kRanks * i);
    }
  });
}

TEST(LaunchOrder, WorkOfSeveralGroupsHasAPlaceInEach) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const std::vector<Communicator*> groups{
        &mesh->world(Purpose::gather),
        &mesh->world(Purpose::reduce)};
    const std::vector<Communicator*> swapped{groups[1], groups[0]};
    const auto a = slow_stream("a", context.rank);
    const auto b = slow_stream("b", context.rank + 2);
    const at::Tensor sums = at::ones({2, 20});
    for (int i = 0; i < 20; ++i) {
      queue_collectives(i % 2 ? *a : *b, i % 2 ? groups : swapped, [=] {
        for (int g = 0; g < 2; ++g) {
          groups[g]->all_reduce(sums[g].narrow(0, i, 1), ReduceOp::sum);
        }
      });
    }
    a->synchronize();
    b->synchronize();
    EXPECT_TRUE(at::equal(sums, at::full({2, 20}, 2.0)));
  });
}

TEST(LaunchOrder, AStreamThatFailedHoldsNobodyUp) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    Communicator* const group = &mesh->world();
    const auto failing = slow_stream("failing", context.rank);
    const auto other = slow_stream("other", context.rank);
    failing->submit([] { throw std::runtime_error("meant"); });
    const at::Tensor sum = at::ones({1});
    for (int i = 0; i < 3; ++i) {
      queue_collectives(*failing, {&group, 1}, [group, sum] {
        group->all_reduce(sum, ReduceOp::sum);
      });
    }
    queue_collectives(*other, {&group, 1}, [group, sum] {
      group->all_reduce(sum, ReduceOp::sum);
    });
    other->synchronize();
    EXPECT_EQ(sum.item<double>(), 2);
    EXPECT_THROW(failing->synchronize(), std::runtime_error);
  });
}

// Such a call would have the place in which its thread happens to run.
TEST(LaunchOrder, AStreamsWorkIsRefusedWithoutAPlace) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto stream = make_stream(kCpu, "plain");
    stream->submit([&] { mesh->world().barrier(); });
    try {
      stream->synchronize();
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      EXPECT_THAT(error.what(), HasSubstr("queue_collectives"));
    }
  });
}

TEST(LaunchOrder, TurnsThatAreDroppedAreSkipped) {
  const auto order = std::make_shared<LaunchOrder>();
  std::vector<int> begun;
  {
    LaunchOrder::Turn first({order});
    auto second =
        std::make_unique<LaunchOrder::Turn>(LaunchOrder::Orders{order});
    auto third =
        std::make_unique<LaunchOrder::Turn>(LaunchOrder::Orders{order});
    second.reset();
    first.begin();
    begun.push_back(1);
    EXPECT_TRUE(order->is_mine());
    third.reset();
  }
  EXPECT_FALSE(order->is_mine());
  LaunchOrder::Turn fourth({order});
  fourth.begin();
  begun.push_back(4);
  EXPECT_THAT(begun, ElementsAre(1, 4));
}

}  // namespace
}  // namespace flatshard
