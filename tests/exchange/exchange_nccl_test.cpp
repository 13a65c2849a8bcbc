// Tokens between GPUs: the collective over NCCL against an all-gather of rows,
// and copies against the collective. One rank per GPU, or two that share one
// (scripts/share_gpu); without GPUs it skips itself.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <random>

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"
#include "tests/exchange/token_transfers.h"
#include "tests/support/gpu_ranks.h"

namespace flatshard {
namespace {

using nn::TokenExchange;
using testing::gpu_ranks;
using Direction = TokenExchange::Direction;

constexpr std::int64_t kExpertsHere = 4;
constexpr std::int64_t kMostRows = 96;
constexpr std::int64_t kWidth = 40;

class ExchangeNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: NCCL is not tested";
    }
    rank = gpu_ranks().rank();
    world = gpu_ranks().world();
    experts = kExpertsHere * world;
    options = at::TensorOptions(gpu_ranks().device);
    static int count = 0;
    mesh =
        gpu_ranks().mesh({{"ep", world}}, fmt::format("exchange{}", count++));
    group = mesh->communicator(0, Purpose::exchange).shared_from_this();
  }

  ExchangeOptions exchange_options(bool by_rank) const {
    return {
        .groups_by_rank = by_rank,
        .stream = {.delay_seed = 5U + rank, .max_delay_us = 200}};
  }

  // Returns the counts of rank `r`: none in some rounds, all of all ranks for
  // one expert in others.
  std::vector<int> counts_of(int r, int round) const {
    std::mt19937 random(100 * round + r);
    std::vector<int> counts(experts);
    if (round % 5 == 1) {
      counts[round % experts] = kMostRows;
    } else if (round % 5 != 2) {
      for (auto left = random() % (kMostRows + 1); left > 0; --left) {
        ++counts[random() % experts];
      }
    }
    return counts;
  }

  at::Tensor rows_of(int r, int round, at::ScalarType dtype) const {
    const at::Tensor numbers = at::arange(kMostRows * kWidth, options);
    return ((numbers * 7 + 31 * r + round).remainder(251) - 125)
        .view({kMostRows, kWidth})
        .to(dtype);
  }

  int rank = 0;
  int world = 1;
  std::int64_t experts = 0;
  at::TensorOptions options;
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Communicator> group;
};

TEST_F(ExchangeNccl, RowsArriveByExpertAndRankAndComeBack) {
  for (const bool by_rank : {false, true}) {
    const auto exchange = std::make_shared<CollectiveExchange>(
        group,
        experts,
        exchange_options(by_rank));
    for (int round = 0; round < 12; ++round) {
      const auto mine = counts_of(rank, round);
      const at::Tensor rows = rows_of(rank, round, at::kFloat).requires_grad_();
      const auto plan =
          exchange->plan(at::tensor(mine, options.dtype(at::kInt)), kMostRows);
      std::vector<at::Tensor> expected{at::empty({0, kWidth}, options)};
      for (std::int64_t e = 0; e < kExpertsHere; ++e) {
        for (int r = 0; r < world; ++r) {
          const auto theirs = counts_of(r, round);
          std::int64_t begin = 0;
          const std::int64_t expert = rank * kExpertsHere + e;
          for (std::int64_t before = 0; before < expert; ++before) {
            begin += theirs[before];
          }
          expected.push_back(
              rows_of(r, round, at::kFloat).narrow(0, begin, theirs[expert]));
        }
      }
      const at::Tensor arrived =
          nn::exchange_rows({exchange, plan, Direction::dispatch}, {rows})[0];
      EXPECT_TRUE(arrived.detach().equal(at::cat(expected))) << round;
      EXPECT_EQ(plan->ends[-1].item<int>(), plan->num_received);
      const at::Tensor back = nn::exchange_rows(
          {exchange, plan, Direction::combine},
          {arrived * 2})[0];
      std::int64_t counted = 0;
      for (const int count : mine) {
        counted += count;
      }
      EXPECT_TRUE(back.detach()
                      .narrow(0, 0, counted)
                      .equal(rows.detach().narrow(0, 0, counted) * 2));
      back.narrow(0, 0, counted).sum().backward();
      EXPECT_TRUE(rows.grad().narrow(0, 0, counted).eq(2).all().item<bool>());
    }
  }
}

TEST_F(ExchangeNccl, CopiesDeliverTheBitsOfTheCollective) {
  const auto hosts = make_page_communicator(group);
  const auto peers = make_peer_communicator(group, {});
  for (const bool by_rank : {false, true}) {
    CollectiveExchange collective(group, experts, exchange_options(by_rank));
    PeerExchange copies(
        peers,
        hosts,
        experts,
        {.window_nbytes = kMostRows * kWidth * 4,
         .exchange = exchange_options(by_rank)});
    auto generator = at::detail::createCPUGenerator(rank + 1);
    for (int round = 0; round < 20; ++round) {
      const at::Tensor counts =
          at::tensor(counts_of(rank, round), options.dtype(at::kInt));
      const auto want = collective.plan(counts, kMostRows);
      const auto got = copies.plan(counts, kMostRows);
      EXPECT_TRUE(got->ends.equal(want->ends)) << round;
      EXPECT_EQ(got->num_received, want->num_received);
      const at::Tensor rows =
          rows_of(rank, round, round % 2 == 0 ? at::kBFloat16 : at::kFloat);
      const at::Tensor arrived =
          copies.start(got, Direction::dispatch, {.rows = {rows}})->finish()[0];
      EXPECT_TRUE(arrived.equal(
          collective.start(want, Direction::dispatch, {.rows = {rows}})
              ->finish()[0]))
          << round;
      const at::Tensor results = arrived * 3;
      const auto counted = counts.sum().item<std::int64_t>();
      const at::Tensor back =
          copies.start(got, Direction::combine, {.rows = {results}})
              ->finish()[0];
      const at::Tensor back_wanted =
          collective.start(want, Direction::combine, {.rows = {results}})
              ->finish()[0];
      EXPECT_TRUE(
          back.narrow(0, 0, counted).equal(back_wanted.narrow(0, 0, counted)))
          << round;
      testing::expect_equal_exchanges(
          {collective, want},
          {copies, got},
          counts,
          round % 3 == 0   ? at::kBFloat16
          : round % 3 == 1 ? at::kFloat
                           : at::kDouble,
          generator);
    }
    group->barrier();
  }
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
