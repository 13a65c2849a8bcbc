#include "tests/support/thread_groups.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

// The groups that most tests of several ranks use behave as groups over Gloo.
namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::make_thread_communicator;
using testing::RankContext;
using testing::run_ranks;

constexpr int kWorld = 3;

std::shared_ptr<Communicator> make_threads(
    const RankContext& context,
    const std::string& name,
    std::chrono::milliseconds timeout = testing::kPeerTimeout) {
  return make_thread_communicator(
      context.store,
      context.rank,
      context.world,
      name,
      at::kCPU,
      {.timeout = timeout});
}

/// Returns the results of each collective on this rank.
std::vector<at::Tensor> results_of(Communicator& group) {
  const int rank = group.rank();
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(rank);
  const at::Tensor in = at::randn({kWorld * 5000}, random);
  std::vector<at::Tensor> results;
  const auto keep = [&](const at::Tensor& tensor) {
    results.push_back(tensor.clone());
    return results.back();
  };
  group.all_gather(keep(at::empty({kWorld * in.numel()})), in);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kInt}) {
    const at::Tensor values = (100 * in).to(dtype);
    const auto op = dtype == at::kInt ? ReduceOp::sum : ReduceOp::avg;
    group.reduce_scatter(keep(at::empty({5000}, values.options())), values, op);
    group.all_reduce(keep(values), op);
    group.all_reduce(keep(values.narrow(0, 0, 7)), op);
  }
  group.broadcast(keep(in), 1);
  // Rank r sends r + 1 rows to itself and none or one to the others.
  std::vector<RowsOfPeer> sends, receives;
  std::int64_t sent = 0, received = 0;
  for (int peer = 0; peer < kWorld; ++peer) {
    const auto rows_of = [](int from, int to) -> std::int64_t {
      return from == to ? from + 1 : (from + to) % 2;
    };
    sends.push_back({peer, sent, rows_of(rank, peer)});
    receives.push_back({peer, received, rows_of(peer, rank)});
    sent += sends.back().rows;
    received += receives.back().rows;
  }
  group.all_to_all(
      keep(at::zeros({received, 4})),
      in.narrow(0, 0, sent * 4).view({sent, 4}),
      receives,
      sends);
  group.barrier();
  return results;
}

TEST(ThreadGroups, GiveTheBitsOfGloo) {
  run_ranks(kWorld, [](RankContext& context) {
    const auto gloo = context.gloo("gloo");
    const auto expected = results_of(*gloo);
    const auto group = make_threads(context, "threads");
    const auto results = results_of(*group);
    ASSERT_EQ(results.size(), expected.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(results[i].equal(expected[i])) << i;
    }
  });
}

ErrorCode code_thrown_by(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::internal;
}

TEST(ThreadGroups, ARankThatLeavesOrAbortsEndsTheOthersWait) {
  for (const bool aborts : {false, true}) {
    run_ranks(kWorld, [&](RankContext& context) {
      auto group = make_threads(context, "threads");
      group->barrier();
      if (context.rank == 1) {
        if (aborts) {
          group->abort();
        }
        group.reset();
        return;
      }
      EXPECT_EQ(code_thrown_by([&] { group->barrier(); }), ErrorCode::comm);
    });
  }
}

TEST(ThreadGroups, APeerThatDoesNotComeIsATimeout) {
  run_ranks(2, [](RankContext& context) {
    const auto group =
        make_threads(context, "threads", std::chrono::milliseconds(50));
    const auto other = make_threads(context, "other");
    if (context.rank == 0) {
      EXPECT_EQ(code_thrown_by([&] { group->barrier(); }), ErrorCode::timeout);
    }
    other->barrier();  // rank 1 has its group until then
    EXPECT_EQ(code_thrown_by([&] { group->barrier(); }), ErrorCode::timeout);
  });
}

TEST(ThreadGroups, CollectivesThatDifferAreNamed) {
  EXPECT_THAT(
      testing::message_of([] {
        run_ranks(2, [](RankContext& context) {
          const auto group = make_threads(context, "threads");
          group->all_reduce(at::ones({4 + context.rank}), ReduceOp::sum);
        });
      }),
      AllOf(HasSubstr("all_reduce"), HasSubstr("4"), HasSubstr("5")));
}

}  // namespace
}  // namespace flatshard
