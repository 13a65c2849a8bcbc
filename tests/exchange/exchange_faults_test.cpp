// Checks the reports of ranks about one that dies, hangs or differs in an
// exchange. Each rank is a process.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>

#include "flatshard/core/error.h"
#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/peer/page_communicator.h"
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
constexpr int kSteps = 24;

/// The actions of a rank in each step. The culprit's differ in kFaultStep.
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
      exchange
          .start(plan, TokenExchange::Direction::dispatch, {.rows = {sent}})
          ->finish()[0];
  const at::Tensor back =
      exchange
          .start(plan, TokenExchange::Direction::combine, {.rows = {arrived}})
          ->finish()[0];
  EXPECT_TRUE(back.equal(sent));
}

/// An exchange of either kind, and the owner of its communicators.
struct Connected {
  std::shared_ptr<Mesh> watched;
  std::unique_ptr<TokenExchange> exchange;
};

Connected connect_exchange(const std::shared_ptr<Mesh>& mesh, bool copies) {
  auto group = mesh->communicator(0, Purpose::exchange).shared_from_this();
  if (!copies) {
    return {mesh, std::make_unique<CollectiveExchange>(group, kWorld)};
  }
  const auto hosts = make_page_communicator(group);
  return {
      mesh->with_communicators({{{"ep"}, hosts, Purpose::exchange}}),
      std::make_unique<PeerExchange>(
          group,
          hosts,
          kWorld,
          PeerExchangeOptions{.window_nbytes = 64})};
}

/// Returns how each rank ended, when `fault` is the culprit's step. The others
/// expect `message`.
std::vector<RankOutcome> run_with(
    const Step& fault,
    bool copies,
    const ::testing::Matcher<const std::string&>& message) {
  return testing::rank_process_outcomes(kWorld, [&](RankContext& context) {
    const auto mesh = Mesh::create(
        {{"ep", kWorld}},
        context.rank,
        context.store,
        at::kCPU,
        {.communicator = {.timeout = std::chrono::seconds(3)}});
    const std::string said = message_of([&] {
      const Connected connected = connect_exchange(mesh, copies);
      for (int step = 1; step <= kSteps; ++step) {
        mesh->set_step(step);
        const bool wrong = context.rank == kCulprit && step == kFaultStep;
        exchange_tokens(
            *connected.exchange,
            context.rank,
            step,
            wrong ? fault : Step());
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

// Returns the collective in which the others are.
::testing::Matcher<const std::string&> waits_in_step_3(
    const std::string& collective) {
  return AllOf(
      AnyOf(HasSubstr("step 3:"), HasSubstr("step 3 |"), HasSubstr("step 3,")),
      HasSubstr(collective),
      HasSubstr("ep.exchange"));
}

class ExchangeFaults : public ::testing::TestWithParam<bool> {
 protected:
  static bool copies() { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(
    By,
    ExchangeFaults,
    ::testing::Bool(),
    [](const auto& info) { return info.param ? "copies" : "collective"; });

// The watcher compares the ranks' launches. Sizes that differ are not an error.
TEST_P(ExchangeFaults, M6_UnevenRowsAreNone) {
  for (const RankOutcome& outcome :
       run_with({}, copies(), HasSubstr("no error"))) {
    EXPECT_EQ(outcome, RankOutcome{});
  }
}

TEST_P(ExchangeFaults, ARankKilledBeforeTheCountsIsNamed) {
  const auto outcomes = run_with(
      {.before_plan = [] { ::raise(SIGKILL); }},
      copies(),
      AllOf(
          HasSubstr("rank 2 of 3 is missing"),
          waits_in_step_3(copies() ? "all_gather" : "all_to_all")));
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
  expect_survivors(outcomes);
}

TEST_P(ExchangeFaults, ARankKilledBetweenCountsAndRowsIsNamed) {
  const auto outcomes = run_with(
      {.before_dispatch = [] { ::raise(SIGKILL); }},
      copies(),
      AllOf(
          HasSubstr("rank 2 of 3 is missing"),
          waits_in_step_3(
              copies() ? "fence" : "all_to_all of rows of 2 Float")));
  EXPECT_EQ(outcomes[kCulprit].signal, SIGKILL);
  expect_survivors(outcomes);
}

TEST_P(ExchangeFaults, AStoppedRankIsNamed) {
  expect_survivors(run_with(
      {.before_dispatch = [] { ::raise(SIGSTOP); }},
      copies(),
      AllOf(
          HasSubstr("rank 2 of 3 is missing: no heartbeat for"),
          HasSubstr("is stopped by a signal"),
          waits_in_step_3(copies() ? "fence" : "all_to_all"))));
}

TEST(CollectiveFaults, ARankWithAnotherDtypeIsNamed) {
  for (const RankOutcome& outcome : run_with(
           {.dtype = at::kBFloat16},
           /*copies=*/false,
           AllOf(
               HasSubstr("rank 2 issues another dtype at ep.exchange #"),
               HasSubstr("all_to_all of rows of 2 BFloat16")))) {
    EXPECT_EQ(outcome, RankOutcome{});
  }
}

}  // namespace
}  // namespace flatshard
