// Copies against the collective: every bit of every row that is counted.
#include "flatshard/exchange/peer_exchange.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "flatshard/comm/forwarding_communicator.h"
#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/peer/page_communicator.h"
#include "tests/exchange/plan_parts.h"
#include "tests/exchange/token_transfers.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using nn::TokenExchange;
using testing::expect_equal_exchanges;
using testing::expect_plans_in_parts;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using Direction = TokenExchange::Direction;

std::shared_ptr<Communicator> group_for(
    const RankContext& context,
    const std::string& name) {
  return make_communicator(
      make_prefix_store(name, context.store),
      context.rank,
      context.world,
      name,
      at::kCPU,
      {.timeout = testing::kPeerTimeout});
}

struct PeerCase {
  int world;
  bool by_rank;
};

class Copies : public ::testing::TestWithParam<PeerCase> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Copies,
    ::testing::Values(
        PeerCase{1, false},
        PeerCase{2, false},
        PeerCase{2, true},
        PeerCase{3, true},
        PeerCase{4, false}),
    [](const auto& info) {
      return fmt::format(
          "{}{}",
          info.param.world,
          info.param.by_rank ? "_by_rank" : "");
    });

constexpr std::int64_t kExpertsHere = 3;
constexpr std::int64_t kMostRows = 8;
constexpr std::int64_t kWidth = 5;

// kMostRows at most; in some rounds none, or all of all ranks for one expert.
at::Tensor random_counts(int round, std::int64_t experts, std::mt19937& own) {
  const at::Tensor counts = at::zeros({experts}, at::kInt);
  if (round % 5 == 1) {
    counts[round % experts] = kMostRows;
  } else if (round % 5 != 2) {
    for (auto left = own() % (kMostRows + 1); left > 0; --left) {
      counts[static_cast<std::int64_t>(own() % experts)] += 1;
    }
  }
  return counts;
}

TEST_P(Copies, M8_DeliverTheBitsOfTheCollective) {
  const PeerCase& param = GetParam();
  run_ranks(param.world, [&](RankContext& context) {
    const std::int64_t experts = kExpertsHere * context.world;
    const ExchangeOptions options{
        .groups_by_rank = param.by_rank,
        .stream = {.delay_seed = 11U + context.rank, .max_delay_us = 200}};
    CollectiveExchange collective(
        group_for(context, "collective"),
        experts,
        options);
    const auto group = group_for(context, "copies");
    PeerExchange copies(
        group,
        make_page_communicator(group),
        experts,
        // With by_rank there is not always room for both tensors of a transfer.
        {.window_nbytes = kMostRows * (kWidth * 8 + (param.by_rank ? 0 : 4)),
         .exchange = options});
    EXPECT_GE(copies.nbytes(), 2 * kMostRows * kWidth * 8);
    std::mt19937 random(21U + context.rank);
    auto generator = at::detail::createCPUGenerator(context.rank + 1);
    for (int round = 0; round < 12; ++round) {
      const at::Tensor counts = random_counts(round, experts, random);
      const auto num_counted = counts.sum().item<std::int64_t>();
      const std::int64_t dropped = round % 2;
      const auto expected = collective.plan(counts, num_counted + dropped);
      const auto got = copies.plan(counts, num_counted + dropped);
      EXPECT_TRUE(got->ends.equal(expected->ends)) << round;
      EXPECT_EQ(got->groups_per_expert, expected->groups_per_expert);
      EXPECT_EQ(got->num_sent, expected->num_sent);
      EXPECT_EQ(got->num_received, expected->num_received);
      const at::ScalarType dtype = round % 3 == 0   ? at::kBFloat16
                                   : round % 3 == 1 ? at::kFloat
                                                    : at::kDouble;
      const auto transfer = [&](TokenExchange& exchange,
                                const nn::ExchangePlanPtr& plan,
                                Direction direction,
                                const nn::TensorList& rows) {
        return exchange.start(plan, direction, {.rows = rows})->finish();
      };
      // Gradients have the same form: the second tensor may be missing.
      const auto with_weights = [&](const at::Tensor& rows) {
        return nn::TensorList{
            rows,
            round % 4 == 3
                ? at::Tensor()
                : at::randn({rows.size(0)}, generator).to(at::kFloat)};
      };
      const auto equal = [](const nn::TensorList& a,
                            const nn::TensorList& b,
                            std::int64_t num_rows) {
        return std::equal(
            a.begin(),
            a.end(),
            b.begin(),
            b.end(),
            [&](const at::Tensor& x, const at::Tensor& y) {
              return x.defined() == y.defined() &&
                     (!x.defined() ||
                      x.narrow(0, 0, num_rows).equal(y.narrow(0, 0, num_rows)));
            });
      };
      const nn::TensorList sent = with_weights(
          at::randn({num_counted + dropped, kWidth}, generator).to(dtype));
      const nn::TensorList arrived =
          transfer(copies, got, Direction::dispatch, sent);
      EXPECT_TRUE(equal(
          arrived,
          transfer(collective, expected, Direction::dispatch, sent),
          got->num_received))
          << round;
      const nn::TensorList results =
          with_weights(at::randn(arrived[0].sizes(), generator).to(dtype));
      const nn::TensorList back =
          transfer(copies, got, Direction::combine, results);
      EXPECT_EQ(back[0].sizes(), sent[0].sizes());
      EXPECT_TRUE(equal(
          back,
          transfer(collective, expected, Direction::combine, results),
          num_counted))
          << round;
      expect_equal_exchanges(
          {collective, expected},
          {copies, got},
          counts,
          dtype,
          generator);
    }
    group->barrier();
  });
}

// After a fence, rank 1 reads only when rank 0 has reached the next one, and so
// has written the data of its next phase.
class SlowReader : public ForwardingCommunicator {
 public:
  SlowReader(
      std::shared_ptr<Communicator> group,
      std::atomic<int>& num_entered,
      int num_fences)
      : ForwardingCommunicator(group, group->name() + ".slow"),
        num_entered_(num_entered),
        num_fences_(num_fences) {}

 protected:
  void do_fence() override {
    ++num_fences_seen_;
    if (rank() == 0) {
      num_entered_ = num_fences_seen_;
    }
    ForwardingCommunicator::do_fence();
    const int next = std::min(num_fences_seen_ + 1, num_fences_);
    while (rank() == 1 && num_entered_ < next) {
      std::this_thread::yield();
    }
  }
  // A comparison would wait for the other rank in front of its next fence.
  std::vector<IssuedCollective> find_mismatch(
      const IssuedCollective& /*mine*/) override {
    return {};
  }

 private:
  std::atomic<int>& num_entered_;
  int num_fences_;
  int num_fences_seen_ = 0;
};

TEST(PeerExchange, M9_ASlowRankReadsWhatWasWrittenForIt) {
  constexpr int kTransfers = 12;
  std::atomic<int> num_entered = 0;
  run_ranks(2, [&](RankContext& context) {
    const auto group = group_for(context, "copies");
    PeerExchange exchange(
        std::make_shared<SlowReader>(group, num_entered, kTransfers),
        make_page_communicator(group),
        2,
        {.window_nbytes = 2 * 4});
    const auto plan = exchange.plan(at::ones({2}, at::kInt), 2);
    std::vector<std::unique_ptr<nn::RowTransfer>> transfers;
    for (int i = 0; i < kTransfers; ++i) {
      transfers.push_back(exchange.start(
          plan,
          i % 4 < 2 ? Direction::dispatch : Direction::combine,
          {.rows = {at::full({2, 1}, 10.0F * i + context.rank)}}));
    }
    for (int i = 0; i < kTransfers; ++i) {
      const at::Tensor expected = (10.0F * i + at::arange(2)).view({2, 1});
      EXPECT_TRUE(transfers[i]->finish()[0].equal(expected)) << i;
    }
    group->barrier();
  });
}

TEST(PeerExchange, ManyUnderWay) {
  run_ranks(3, [](RankContext& context) {
    const auto group = group_for(context, "copies");
    PeerExchange exchange(
        group,
        make_page_communicator(group),
        3,
        {.window_nbytes = 6 * 4,
         .exchange = {
             .stream = {
                 .delay_seed = 1U + context.rank,
                 .max_delay_us = 300}}});
    const auto plan = exchange.plan(at::full({3}, 2, at::kInt), 6);
    std::vector<std::unique_ptr<nn::RowTransfer>> transfers;
    const auto direction = [](int i) {
      return i % 3 == 0 ? Direction::combine : Direction::dispatch;
    };
    for (int i = 0; i < 60; ++i) {
      const at::Tensor rows = at::full({6, 1}, 10.0F * i + context.rank);
      transfers.push_back(exchange.start(plan, direction(i), {.rows = {rows}}));
    }
    for (int i = 0; i < 60; ++i) {
      const at::Tensor expected =
          (10.0F * i + at::arange(3)).repeat_interleave(2).view({6, 1});
      EXPECT_TRUE(transfers[i]->finish()[0].equal(expected)) << i;
    }
    group->barrier();
  });
}

TEST(PeerExchange, PlansInTwoParts) {
  run_ranks(2, [](RankContext& context) {
    const auto group = group_for(context, "copies");
    PeerExchange exchange(
        group,
        make_page_communicator(group),
        2,
        {.window_nbytes = 64});
    const at::Tensor counts = at::tensor({1, 1 + context.rank}, at::kInt);
    const auto plan = expect_plans_in_parts(exchange, counts, 4);
    EXPECT_EQ(plan->num_received, 2 + context.rank);
    const at::Tensor rows = at::full({4, 1}, 1.0F + context.rank);
    EXPECT_EQ(
        exchange.start(plan, Direction::dispatch, {.rows = {rows}})
            ->finish()[0]
            .size(0),
        2 + context.rank);
    group->barrier();
  });
}

class WatchedCopies : public PeerExchange {
 public:
  using PeerExchange::PeerExchange;
  std::function<void()> on_begun = [] {};

 protected:
  void begin_dispatch(const nn::ExchangePlanPtr& plan, nn::TransferInput& input)
      override {
    PeerExchange::begin_dispatch(plan, input);
    stream().synchronize();
    on_begun();
  }
};

// Rank 1 counts its rows when rank 0 has its own in the window, and no longer
// needs the tokens of those that leave.
TEST(PeerExchange, M9_RowsLeaveBeforeTheOtherRanksHaveCounted) {
  std::promise<void> begun;
  auto has_begun = begun.get_future().share();
  run_ranks(2, [&](RankContext& context) {
    const auto group = group_for(context, "copies");
    WatchedCopies exchange(
        group,
        make_page_communicator(group),
        2,
        {.window_nbytes = 64});
    const at::Tensor x =
        (at::arange(1, 4) + 10 * context.rank).to(at::kFloat).view({3, 1});
    const at::Tensor experts = at::tensor({1, 0, 1}, at::kInt).view({3, 1});
    const at::Tensor counts = at::tensor({1, 2}, at::kInt);
    if (context.rank == 0) {
      exchange.on_begun = [&] {
        x.neg_();
        begun.set_value();
      };
    } else {
      // If rank 0 waited for the counts first, both would wait forever.
      EXPECT_EQ(
          has_begun.wait_for(std::chrono::seconds(20)),
          std::future_status::ready);
    }
    const at::Tensor arrived =
        exchange
            .start(
                exchange.begin_plan(counts, 3),
                Direction::dispatch,
                {.rows = {x}, .tokens = nn::sort_by_expert(experts, counts)})
            ->finish()[0];
    EXPECT_TRUE(arrived.flatten().equal(
        context.rank == 0 ? at::tensor({-2.0F, 12.0F})
                          : at::tensor({1.0F, 3.0F, 11.0F, 13.0F})));
    group->barrier();
  });
}

// Windows that are too small are reallocated, and then have room for all rows.
TEST(PeerExchange, M9_APlanThatIsOnlyBegunDispatchesTheSameRows) {
  run_ranks(2, [](RankContext& context) {
    const auto group = group_for(context, "copies");
    PeerExchange exchange(
        group,
        make_page_communicator(group),
        4,
        {.exchange = {
             .stream = {
                 .delay_seed = 1U + context.rank,
                 .max_delay_us = 300}}});
    const at::Tensor counts = at::tensor({2, 1, context.rank, 2}, at::kInt);
    const at::Tensor experts =
        at::tensor({3, 0, 1, 4, 0, context.rank == 0 ? 4 : 2, 4, 3}, at::kInt);
    const nn::Permutation order =
        nn::sort_by_expert(experts.view({4, 2}), counts);
    for (const std::int64_t width : {1, 2, 64, 3, 1024}) {
      const at::Tensor x = at::randn({4, width});
      const auto dispatch = [&](const nn::ExchangePlanPtr& plan) {
        return exchange.start(
            plan,
            Direction::dispatch,
            {.rows = {x, at::arange(8, at::kFloat)}, .tokens = order});
      };
      const auto early = dispatch(exchange.begin_plan(counts, 8));
      const auto late = dispatch(exchange.plan(counts, 8));
      const nn::TensorList got = early->finish();
      const nn::TensorList want = late->finish();
      EXPECT_EQ(got[0].size(0), context.rank == 0 ? 6 : 5);
      EXPECT_TRUE(got[0].equal(want[0])) << width;
      EXPECT_TRUE(got[1].equal(want[1])) << width;
    }
    group->barrier();
  });
}

TEST(PeerExchange, RowsBeyondAWindowAreNamedOnAllRanks) {
  std::atomic<int> num_fences{0};
  run_ranks(2, [&](RankContext& context) {
    const auto group = std::make_shared<SlowReader>(
        group_for(context, "copies"),
        num_fences,
        /*num_fences=*/0);
    PeerExchange exchange(
        group,
        make_page_communicator(group),
        2,
        {.window_nbytes = 16});
    // Rank 0 has 2 rows and rank 1 has 3.
    const std::int64_t num_rows = 2 + context.rank;
    const auto plan =
        exchange.plan(at::tensor({1, 1 + context.rank}, at::kInt), num_rows);
    EXPECT_THAT(
        message_of([&] {
          exchange.start(
              plan,
              Direction::dispatch,
              {.rows = {at::ones({num_rows, 2})}});
        }),
        HasSubstr("a rank has 3 rows of 8 bytes, and windows of 16 bytes"));
    // Three tensors that fit one by one have a fence each, while bytes share
    // one.
    const at::Tensor narrow = at::full({num_rows, 1}, 3.0F);
    const at::Tensor bytes = at::full({num_rows, 1}, 3, at::kByte);
    for (const auto& [rows, fences] :
         {std::pair(nn::TensorList{narrow, narrow * 2, narrow * 3}, 3),
          std::pair(nn::TensorList{bytes, bytes * 2, bytes * 3}, 1)}) {
      group->barrier();
      const int before = num_fences;
      group->barrier();
      const nn::TensorList arrived =
          exchange.start(plan, Direction::dispatch, {.rows = rows})->finish();
      for (int i = 0; i < 3; ++i) {
        const at::Tensor expected = at::full(
            {2 + context.rank, 1},
            3 * (i + 1),
            rows.front().options());
        EXPECT_TRUE(arrived[i].equal(expected)) << i;
      }
      group->barrier();
      EXPECT_EQ(num_fences - before, fences);
    }
    group->barrier();
  });
}

TEST(PeerExchange, WindowsGrowWhileTransfersAreUnderWay) {
  run_ranks(2, [](RankContext& context) {
    const auto group = group_for(context, "copies");
    PeerExchange exchange(
        group,
        make_page_communicator(group),
        2,
        {.exchange = {
             .stream = {
                 .delay_seed = 1U + context.rank,
                 .max_delay_us = 300}}});
    EXPECT_EQ(exchange.nbytes(), 0);
    std::vector<std::unique_ptr<nn::RowTransfer>> transfers;
    std::vector<std::int64_t> held;
    const std::vector<std::int64_t> widths{1, 2, 2, 64, 3, 1024};
    for (const std::int64_t width : widths) {
      // Rank 0 has 2 rows and rank 1 has 3, two of which are for expert 1.
      const std::int64_t num_rows = 2 + context.rank;
      const auto plan =
          exchange.plan(at::tensor({1, 1 + context.rank}, at::kInt), num_rows);
      const at::Tensor rows =
          at::full({num_rows, width}, static_cast<float>(width + context.rank));
      transfers.push_back(
          exchange.start(plan, Direction::dispatch, {.rows = {rows}}));
      held.push_back(exchange.nbytes());
    }
    // Twice 3 rows, a quarter more, and to the next 256 bytes.
    EXPECT_THAT(held, ::testing::ElementsAre(512, 512, 512, 2048, 2048, 30720));
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto sum = static_cast<float>(
          widths[i] * ((2 + context.rank) * widths[i] + 1 + context.rank));
      EXPECT_EQ(transfers[i]->finish()[0].sum().item<float>(), sum) << i;
    }
    group->barrier();
  });
}

TEST(PeerExchange, AfterAFailureAllRanksBeginAnew) {
  run_ranks(2, [](RankContext& context) {
    const auto group = group_for(context, "copies");
    const auto hosts = make_page_communicator(group);
    PeerExchange exchange(group, hosts, 2, {.window_nbytes = 64});
    const at::Tensor counts = at::ones({2}, at::kInt);
    if (context.rank == 0) {
      EXPECT_THAT(
          message_of([&] { exchange.plan(counts, 2); }),
          HasSubstr("rank 1 of the group sends 1 bytes, this rank 8"));
      EXPECT_THAT(
          message_of([&] { exchange.plan(counts, 2); }),
          HasSubstr("all of them call restart() first"));
    } else {
      EXPECT_THROW(
          hosts->all_gather(at::empty({2}, at::kByte), at::ones(1, at::kByte)),
          Error);
    }
    exchange.restart();
    const auto plan = exchange.plan(counts, 2);
    const at::Tensor rows = at::full({2, 1}, 1.0F + context.rank);
    EXPECT_TRUE(exchange.start(plan, Direction::dispatch, {.rows = {rows}})
                    ->finish()[0]
                    .equal(at::tensor({1.0F, 2.0F}).view({2, 1})));
    group->barrier();
  });
}

}  // namespace
}  // namespace flatshard
