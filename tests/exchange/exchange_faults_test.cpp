// What ranks say of one that dies, hangs or differs while tokens travel. Each
// rank is a process.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>

#include "flatshard/core/error.h"
#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using nn::TokenExchange;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::RankOutcome;

constexpr int kWorld = 3;
constexpr int kCulprit = 2;
constexpr int kFaultStep = 3;
// The watcher compares what 64 collectives have in common.
constexpr int kSteps = 30;

/// What a rank of the test does in kFaultStep, which goes wrong on one.
struct Step {
  std::function<void()> before_plan = [] {};
  std::function<void()> before_dispatch = [] {};
  at::ScalarType dtype = at::kFloat;
};

// Ranks send numbers of rows that differ between ranks and steps, some none.
void exchange_tokens(TokenExchange& exchange, int rank, int step, Step what) {
  const std::vector<int> mine{(rank + step) % 3, step % 2, rank};
  const std::int64_t num_rows = mine[0] + mine[1] + mine[2];
  what.before_plan();
  const auto plan = exchange.plan(at::tensor(mine, at::kInt), num_rows);
  what.before_dispatch();
  const at::Tensor sent = at::full({num_rows, 2}, rank, what.dtype);
  const at::Tensor arrived =
      exchange.start(plan, TokenExchange::Way::dispatch, sent)->finish();
  const at::Tensor back =
      exchange.start(plan, TokenExchange::Way::combine, arrived)->finish();
  EXPECT_TRUE(back.equal(sent));
}

/// How each rank ended, when `fault` is the culprit's step. The others expect
/// `message`.
std::vector<RankOutcome> run_with(
    const Step& fault,
    const ::testing::Matcher<const std::string&>& message) {
  return testing::rank_process_outcomes(kWorld, [&](RankContext& context) {
    const auto mesh = Mesh::create(
        {{"ep", kWorld}},
        context.rank,
        context.store,
        at::kCPU,
        {.communicator = {.timeout = std::chrono::seconds(3)}});
    const std::string said = message_of([&] {
      CollectiveExchange exchange(
          mesh->communicator(0, Purpose::exchange).shared_from_this(),
          kWorld);
      for (int step = 1; step <= kSteps; ++step) {
        mesh->set_step(step);
        const bool wrong = context.rank == kCulprit && step == kFaultStep;
        exchange_tokens(exchange, context.rank, step, wrong ? fault : Step());
      }
      mesh->world().barrier();
    });
    EXPECT_THAT(said, message) << "on rank " << context.rank;
  });
}

// All but the culprit.
void expect_survivors(const std::vector<RankOutcome>& outcomes) {
  for (int rank = 0; rank < kWorld; ++rank) {
    if (rank != kCulprit) {
      EXPECT_EQ(outcomes[rank], RankOutcome{}) << rank;
    }
  }
}

const auto kWaitsInStep3 = AllOf(
    AnyOf(HasSubstr("step 3:"), HasSubstr("step 3 |"), HasSubstr("step 3,")),
    HasSubstr("all_to_all"),
    HasSubstr("ep.exchange #"));

// The watcher compares what ranks launched; sizes that differ are no fault.
TEST(ExchangeFaults, UnevenRowsAreNone) {
  for (const RankOutcome& outcome : run_with({}, HasSubstr("no error"))) {
    EXPECT_EQ(outcome, RankOutcome{});
  }
}

TEST(ExchangeFaults, ARankKilledBeforeTheCountsIsNamed) {
  const auto outcomes = run_with(
      {.before_plan = [] { ::raise(SIGKILL); }},
      AllOf(HasSubstr("rank 2 of 3 is missing"), kWaitsInStep3));
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
  expect_survivors(outcomes);
}

TEST(ExchangeFaults, ARankKilledBetweenCountsAndRowsIsNamed) {
  const auto outcomes = run_with(
      {.before_dispatch = [] { ::raise(SIGKILL); }},
      AllOf(
          HasSubstr("rank 2 of 3 is missing"),
          HasSubstr("all_to_all of rows of 2 Float"),
          kWaitsInStep3));
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
  expect_survivors(outcomes);
}

TEST(ExchangeFaults, AStoppedRankIsNamed) {
  expect_survivors(run_with(
      {.before_dispatch = [] { ::raise(SIGSTOP); }},
      AllOf(
          HasSubstr("rank 2 of 3 is missing: no heartbeat for"),
          HasSubstr("is stopped by a signal"),
          kWaitsInStep3)));
}

TEST(ExchangeFaults, ARankWithAnotherDtypeIsNamed) {
  for (const RankOutcome& outcome : run_with(
           {.dtype = at::kBFloat16},
           AllOf(
               HasSubstr("rank 2 issues another dtype at ep.exchange #"),
               HasSubstr("all_to_all of rows of 2 BFloat16")))) {
    EXPECT_EQ(outcome, RankOutcome{});
  }
}

}  // namespace
}  // namespace flatshard
