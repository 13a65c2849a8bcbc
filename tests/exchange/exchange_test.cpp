#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/exchange/collective_exchange.h"
#include "tests/exchange/plan_parts.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using nn::TokenExchange;
using testing::expect_plans_in_parts;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

std::shared_ptr<Communicator> connect(const RankContext& context) {
  return context.gloo("ep.exchange");
}

struct Case {
  int world;
  bool by_rank;
  int ranks_per_expert = 1;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format(
      "{}_of_{}{}",
      info.param.world,
      info.param.ranks_per_expert,
      info.param.by_rank ? "_by_rank" : "");
}

class Exchanges : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Exchanges,
    ::testing::Values(
        Case{1, false},
        Case{1, true},
        Case{2, false},
        Case{2, true},
        Case{3, false},
        Case{4, true},
        Case{2, false, 2},
        Case{4, false, 2},
        Case{4, true, 2},
        Case{3, false, 3}),
    name_of);

constexpr std::int64_t kPerRank = 3;

/// Returns the rows that rank `rank` has for each expert; none at all now and
/// then.
std::vector<std::int64_t>
draw_counts(int round, int rank, std::int64_t experts) {
  std::mt19937 random(100 * round + rank);
  std::vector<std::int64_t> counts(experts);
  for (std::int64_t& rows : counts) {
    rows = round == 0 || random() % 3 == 0 ? 0 : random() % 6;
  }
  return counts;
}

/// [rows, 2]: rank and number of each row, and the expert that it is for.
at::Tensor rows_of(int rank, const std::vector<std::int64_t>& counts) {
  std::vector<at::Tensor> rows{at::empty({0, 2}, at::kDouble)};
  std::int64_t number = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    for (std::int64_t i = 0; i < counts[e]; ++i) {
      rows.push_back(at::tensor(
          {rank * 1000.0 + static_cast<double>(number++),
           static_cast<double>(e)},
          at::kDouble));
      rows.back() = rows.back().view({1, 2});
    }
  }
  return at::cat(rows);
}

TEST_P(Exchanges, RowsArriveByExpertAndRankAndComeBack) {
  const Case& param = GetParam();
  run_ranks(param.world, [&](RankContext& context) {
    const int world = context.world;
    const int holders = world / param.ranks_per_expert;
    const std::int64_t experts = kPerRank * holders;
    const auto exchange = std::make_shared<CollectiveExchange>(
        connect(context),
        experts,
        ExchangeOptions{
            .groups_by_rank = param.by_rank,
            .ranks_per_expert = param.ranks_per_expert,
            .stream = {.delay_seed = 3U + context.rank, .max_delay_us = 300}});
    for (int round = 0; round < 8; ++round) {
      const auto mine = draw_counts(round, context.rank, experts);
      // A dropped row comes after those that are counted.
      const at::Tensor sent = at::cat(
          {rows_of(context.rank, mine), at::full({1, 2}, -1, at::kDouble)});
      const auto plan =
          exchange->plan(at::tensor(mine, at::kInt), sent.size(0));

      std::vector<at::Tensor> expected{at::empty({0, 2}, at::kDouble)};
      std::vector<int> ends;
      std::int64_t end = 0;
      for (std::int64_t e = 0; e < kPerRank; ++e) {
        for (int peer = 0; peer < world; ++peer) {
          const auto theirs = draw_counts(round, peer, experts);
          const at::Tensor all = rows_of(peer, theirs);
          const std::int64_t expert = context.rank % holders * kPerRank + e;
          expected.push_back(
              all.index({all.select(1, 1) == static_cast<double>(expert)}));
          end += theirs[expert];
          if (param.by_rank || peer == world - 1) {
            ends.push_back(static_cast<int>(end));
          }
        }
      }
      EXPECT_EQ(plan->groups_per_expert, param.by_rank ? world : 1);
      EXPECT_EQ(plan->num_received, end);
      EXPECT_TRUE(plan->ends.equal(at::tensor(ends, at::kInt)))
          << plan->ends << at::tensor(ends);

      const at::Tensor rows = sent.detach().clone().requires_grad_();
      const at::Tensor arrived = nn::exchange_rows(
          {exchange, plan, TokenExchange::Direction::dispatch},
          {rows})[0];
      EXPECT_TRUE(arrived.detach().equal(at::cat(expected))) << round;
      const at::Tensor back = nn::exchange_rows(
          {exchange, plan, TokenExchange::Direction::combine},
          {arrived * (2.0 + context.rank / holders)})[0];
      double factor = 0;  // of all parts of the width
      for (int part = 0; part < param.ranks_per_expert; ++part) {
        factor += 2.0 + part;
      }
      const std::int64_t counted = sent.size(0) - 1;
      EXPECT_TRUE(back.detach()
                      .narrow(0, 0, counted)
                      .equal(sent.narrow(0, 0, counted) * factor));
      back.narrow(0, 0, counted).sum().backward();
      EXPECT_TRUE(
          rows.grad().narrow(0, 0, counted).eq(factor).all().item<bool>());
    }
  });
}

TEST(Exchange, SeveralUnderWayFinishInTheirOrder) {
  run_ranks(2, [](RankContext& context) {
    CollectiveExchange exchange(
        connect(context),
        2,
        {.stream = {.delay_seed = 1U + context.rank, .max_delay_us = 500}});
    const auto plan = exchange.plan(at::tensor({1, 2}, at::kInt), 3);
    std::vector<std::unique_ptr<nn::RowTransfer>> transfers;
    for (int i = 0; i < 20; ++i) {
      transfers.push_back(exchange.start(
          plan,
          TokenExchange::Direction::dispatch,
          {.rows = {at::full({3, 1}, 10 * i + context.rank)}}));
    }
    transfers[7].reset();  // nobody wants it
    for (int i = 0; i < 20; ++i) {
      if (transfers[i] != nullptr) {
        const at::Tensor rows = transfers[i]->finish()[0];
        EXPECT_EQ(rows.size(0), context.rank == 0 ? 2 : 4);
        EXPECT_EQ(rows[0].item<float>(), 10.0F * i);
        EXPECT_EQ(rows[-1].item<float>(), 10.0F * i + 1);
      }
    }
  });
}

TEST(Exchange, P7_RowsWaitForAnEventAndAreAwaited) {
  run_ranks(2, [](RankContext& context) {
    CollectiveExchange exchange(
        connect(context),
        2,
        {.stream = {.delay_seed = 1U + context.rank, .max_delay_us = 500}});
    const auto plan = exchange.plan(at::tensor({1, 2}, at::kInt), 3);
    const at::Tensor x = at::zeros({3, 1});
    const auto maker = make_stream(at::kCPU, "maker");
    maker->submit([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      x.fill_(1 + context.rank);
    });
    Event made;
    made.record(*maker);
    const auto transfer = exchange.start(
        plan,
        TokenExchange::Direction::dispatch,
        {.rows = {x}, .after = made});
    const nn::TensorList rows = transfer->finish();
    ASSERT_EQ(rows.size(), 1U);
    ASSERT_EQ(rows[0].size(0), context.rank == 0 ? 2 : 4);
    EXPECT_EQ(rows[0][0].item<float>(), 1);
    EXPECT_EQ(rows[0][-1].item<float>(), 2);
  });
}

TEST(Exchange, PlansInTwoParts) {
  run_ranks(2, [](RankContext& context) {
    CollectiveExchange exchange(
        connect(context),
        2,
        {.stream = {.delay_seed = 1U + context.rank, .max_delay_us = 500}});
    const at::Tensor counts = at::tensor({1, 2}, at::kInt);
    EXPECT_FALSE(exchange.begin_plan(counts, 4)->ends.defined());
    expect_plans_in_parts(exchange, counts, 4);
  });
}

// Shows when it has permuted what it sends.
class WatchedExchange : public CollectiveExchange {
 public:
  using CollectiveExchange::CollectiveExchange;
  std::function<void(const nn::TransferInput& rows)> on_rows =
      [](const nn::TransferInput&) {};

 protected:
  void begin_dispatch(const nn::ExchangePlanPtr& plan, nn::TransferInput& input)
      override {
    CollectiveExchange::begin_dispatch(plan, input);
    on_rows(input);
  }
};

// Rank 1 counts its rows when rank 0 has permuted its own.
TEST(Exchange, TokensArePermutedBeforeTheOtherRanksHaveCounted) {
  std::promise<void> permuted;
  auto is_permuted = permuted.get_future().share();
  run_ranks(2, [&](RankContext& context) {
    const auto exchange =
        std::make_shared<WatchedExchange>(connect(context), 2);
    const at::Tensor x = at::arange(6, at::kFloat).view({3, 2});
    const at::Tensor experts = at::tensor({1, 0, 1}, at::kInt).view({3, 1});
    const at::Tensor counts = at::tensor({1, 2}, at::kInt);
    const nn::Permutation order = nn::sort_by_expert(experts, counts);
    const at::Tensor weights = at::ones({3});
    if (context.rank == 0) {
      exchange->on_rows = [&](const nn::TransferInput& input) {
        EXPECT_FALSE(input.tokens);
        EXPECT_TRUE(input.rows[0].equal(nn::permute_rows(x, order)));
        permuted.set_value();
      };
    } else {
      // If rank 0 waited for the counts first, both would wait forever.
      EXPECT_EQ(
          is_permuted.wait_for(std::chrono::seconds(20)),
          std::future_status::ready);
    }
    const auto begun = exchange->begin_plan(counts, 3);
    const auto dispatch = [&](const nn::ExchangePlanPtr& plan) {
      return nn::exchange_rows(
          {exchange, plan, TokenExchange::Direction::dispatch, order},
          {x, weights});
    };
    const nn::TensorList early = dispatch(begun);
    const auto finished = exchange->plan(counts, 3);
    const nn::TensorList late = dispatch(finished);
    EXPECT_EQ(begun->num_received, finished->num_received);
    EXPECT_TRUE(begun->ends.equal(finished->ends));
    for (std::size_t i = 0; i < late.size(); ++i) {
      EXPECT_TRUE(early[i].equal(late[i]));
    }
  });
}

TEST(Exchange, WaitsAreMeasured) {
  run_ranks(2, [](RankContext& context) {
    CollectiveExchange exchange(
        connect(context),
        2,
        {.stream = {.delay_seed = 1, .max_delay_us = 2000}});
    const auto plan = exchange.plan(at::tensor({1, 1}, at::kInt), 2);
    const auto exchanged_ms = [&] {
      for (int i = 0; i < 5; ++i) {
        exchange
            .start(
                plan,
                TokenExchange::Direction::dispatch,
                {.rows = {at::ones({2, 1})}})
            ->finish();
      }
      return exchange.wait_and_take_exposed_ms();
    };
    EXPECT_EQ(exchanged_ms(), 0);
    exchange.measure(true);
    EXPECT_GT(exchanged_ms(), 0);
  });
}

TEST(Exchange, BadNumbersAreNamed) {
  run_ranks(2, [](RankContext& context) {
    const auto group = connect(context);
    EXPECT_THAT(
        message_of([&] { CollectiveExchange(group, 3); }),
        HasSubstr("3 experts do not divide by 2 ranks"));
    EXPECT_THAT(
        message_of([&] { CollectiveExchange(group, 2 + 2 * context.rank); }),
        HasSubstr("rank 1 of the group has layers of 4 experts, rank 0 of 2"));
    EXPECT_THAT(
        message_of(
            [&] { CollectiveExchange(group, 2, {.ranks_per_expert = 3}); }),
        HasSubstr("expected a divisor of 2 ranks for those that share an "
                  "expert, got 3"));
    CollectiveExchange exchange(group, 2);
    EXPECT_THAT(
        message_of([&] { exchange.plan(at::ones({3}, at::kInt), 3); }),
        HasSubstr("expected int32 [2] counts, got Int [3]"));
    EXPECT_THAT(
        message_of([&] { exchange.plan(at::ones({2}, at::kInt), 1); }),
        HasSubstr("2 rows are counted, but there are 1"));
    const auto own = exchange.plan(at::ones({2}, at::kInt), 2);
    EXPECT_THAT(
        message_of([&] {
          exchange.start(
              own,
              TokenExchange::Direction::dispatch,
              {.rows = {at::ones({3, 1})}});
        }),
        HasSubstr("expected 2 rows, got [3, 1]"));
    nn::LocalExchange other;
    const auto plan = other.plan(at::ones({2}, at::kInt), 2);
    EXPECT_THAT(
        message_of([&] {
          exchange.start(
              plan,
              TokenExchange::Direction::dispatch,
              {.rows = {at::ones({2, 1})}});
        }),
        HasSubstr("got another's"));
  });
}

}  // namespace
}  // namespace flatshard
