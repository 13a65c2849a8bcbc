// Compares two ranks' results for the rows that meet at an expert with one rank
// that has both ranks' tokens as two microbatches.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <vector>

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/peer/page_communicator.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;
using Direction = nn::TokenExchange::Direction;

constexpr int kNumRanks = 2;
constexpr std::int64_t kNumExperts = 4;
constexpr std::int64_t kNumRows = 53;
constexpr std::int64_t kIn = 24;

at::Tensor normal(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

// Returns the counts of rank `rank`. One expert has no row of rank 1.
at::Tensor counts_of_rank(int rank) {
  return rank == 0 ? at::tensor({11, 20, 5, 17}, at::kInt)
                   : at::tensor({30, 0, 22, 1}, at::kInt);
}

struct Computed {
  at::Tensor results;       ///< [kNumRows, kIn]
  at::Tensor row_grads;     ///< the same
  at::Tensor weight_grads;  ///< of the experts here
};

// Tokens of rank `rank`, with the experts whose weights these are.
Computed compute(
    const std::shared_ptr<nn::TokenExchange>& exchange,
    int rank,
    const at::Tensor& weight) {
  const at::Tensor rows = normal({kNumRows, kIn}, 5 + rank).requires_grad_();
  const auto plan = exchange->plan(counts_of_rank(rank), kNumRows);
  const at::Tensor arrived =
      nn::exchange_rows({exchange, plan, Direction::dispatch}, {rows})[0];
  const at::Tensor results = nn::exchange_rows(
      {exchange, plan, Direction::combine},
      {nn::grouped_linear(
          arrived,
          weight,
          {plan->ends, plan->groups_per_expert})})[0];
  (results * normal({kNumRows, kIn}, 15 + rank)).sum().backward();
  return {results.detach(), rows.grad(), weight.grad()};
}

at::Tensor whole_weight() {
  return normal({kNumExperts, kIn, kIn}, 25);
}

void expect_bits_of_two_microbatches(
    const std::shared_ptr<nn::TokenExchange>& exchange,
    int rank) {
  const std::int64_t here = kNumExperts / kNumRanks;
  const at::Tensor weight =
      whole_weight().narrow(0, rank * here, here).clone().requires_grad_();
  const Computed got = compute(exchange, rank, weight);

  const at::Tensor whole = whole_weight().requires_grad_();
  const auto local = std::make_shared<nn::LocalExchange>();
  std::vector<Computed> microbatches;
  for (int microbatch = 0; microbatch < kNumRanks; ++microbatch) {
    microbatches.push_back(compute(local, microbatch, whole));
  }
  const Computed& mine = microbatches.at(rank);
  EXPECT_TRUE(got.results.equal(mine.results));
  EXPECT_TRUE(got.row_grads.equal(mine.row_grads));
  EXPECT_TRUE(
      got.weight_grads.equal(whole.grad().narrow(0, rank * here, here)));
}

TEST(GroupsByRank, M11_GiveTheBitsOfTwoMicrobatches) {
  run_ranks(kNumRanks, [](RankContext& context) {
    const auto group = context.gloo("ep.exchange");
    const ExchangeOptions options{.groups_by_rank = true};
    expect_bits_of_two_microbatches(
        std::make_shared<CollectiveExchange>(group, kNumExperts, options),
        context.rank);
    expect_bits_of_two_microbatches(
        std::make_shared<PeerExchange>(
            group,
            make_page_communicator(group),
            kNumExperts,
            PeerExchangeOptions{
                .window_nbytes = kNumRows * kIn * 4,
                .exchange = options}),
        context.rank);
    group->barrier();
  });
}

}  // namespace
}  // namespace flatshard
