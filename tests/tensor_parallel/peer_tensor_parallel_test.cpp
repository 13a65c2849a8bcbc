// Copies against collectives, for full transfers and matmuls in parts.
#include "flatshard/tensor_parallel/peer_tensor_parallel.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <future>

#include "flatshard/nn/parallel/parallel_products.h"
#include "flatshard/tensor_parallel/collective_tensor_parallel.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"

namespace flatshard {
namespace {

using testing::RankContext;
using testing::run_ranks;

// On CPUs, a matmul of a part of the rows runs other kernels than a matmul of
// all. Their sums have 16 addends of about one, and then one of each rank.
const double kSameProduct =
    testing::sum_tolerance({.addends = 16, .in_a_row = 2, .size = 4});

class CopiedActivations : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CopiedActivations, ::testing::Values(2, 3, 4));

struct BothWays {
  explicit BothWays(const RankContext& context)
      : collective(context.gloo("collective"), delays(context, 1)),
        copies(context.gloo("copies"), {.stream = delays(context, 2)}) {}

  static StreamOptions delays(const RankContext& context, int seed) {
    return {.delay_seed = 10U * seed + context.rank, .max_delay_us = 300};
  }

  CollectiveTensorParallel collective;
  PeerTensorParallel copies;
};

TEST_P(CopiedActivations, WholeTransfersHaveTheBitsOfCollectives) {
  run_ranks(GetParam(), [](RankContext& context) {
    BothWays ranks(context);
    auto generator = at::detail::createCPUGenerator(context.rank + 1);
    for (int round = 0; round < 12; ++round) {
      // Windows grow in some rounds, and sizes are not aligned.
      const std::int64_t n = 1 + 5 * (round % 4) + round / 4;
      const at::ScalarType dtype = round % 3 == 0   ? at::kBFloat16
                                   : round % 3 == 1 ? at::kFloat
                                                    : at::kDouble;
      const at::Tensor part =
          at::randn({n, 7}, generator, at::kDouble).to(dtype);
      const at::Tensor addend =
          at::randn({n * context.world, 7}, generator, at::kDouble).to(dtype);
      EXPECT_TRUE(ranks.copies.all_gather(part).equal(
          ranks.collective.all_gather(part)))
          << round;
      EXPECT_TRUE(ranks.copies.reduce_scatter(addend).equal(
          ranks.collective.reduce_scatter(addend)))
          << round;
      // Two under way, finished in the other order.
      auto gather = ranks.copies.start_all_gather(part);
      auto scatter = ranks.copies.start_reduce_scatter(addend);
      EXPECT_TRUE(
          scatter->finish().equal(ranks.collective.reduce_scatter(addend)))
          << round;
      EXPECT_TRUE(gather->finish().equal(ranks.collective.all_gather(part)))
          << round;
      // These results are not used.
      ranks.copies.start_all_gather(part);
      ranks.copies.start_reduce_scatter(addend);
    }
    EXPECT_GT(ranks.copies.nbytes(), 0);
  });
}

TEST_P(CopiedActivations, ProductsInPartsAreThoseOfTheWhole) {
  run_ranks(GetParam(), [](RankContext& context) {
    BothWays ranks(context);
    auto generator = at::detail::createCPUGenerator(context.rank + 1);
    const auto near = [](const at::Tensor& got, const at::Tensor& want) {
      return got.allclose(want, kSameProduct, kSameProduct);
    };
    for (int round = 0; round < 6; ++round) {
      const std::int64_t n = 2 + round;
      const at::Tensor part = at::randn({n, 16}, generator);
      const at::Tensor rows = at::randn({n * context.world, 16}, generator);
      const at::Tensor weight = at::randn({9, 16}, generator);
      const at::Tensor bias =
          round % 2 == 0 ? at::Tensor() : at::randn({9}, generator);
      const auto got =
          nn::gather_and_multiply(ranks.copies, part, weight.t(), bias);
      const auto want =
          nn::gather_and_multiply(ranks.collective, part, weight.t(), bias);
      EXPECT_TRUE(got.rows.equal(want.rows)) << round;
      EXPECT_TRUE(near(got.product, want.product)) << round;
      EXPECT_TRUE(near(
          want.product,
          bias.defined() ? want.rows.matmul(weight.t()) + bias
                         : want.rows.matmul(weight.t())))
          << round;
      EXPECT_TRUE(near(
          nn::multiply_and_scatter(ranks.copies, rows, weight.t()),
          nn::multiply_and_scatter(ranks.collective, rows, weight.t())))
          << round;
    }
  });
}

// The matmul of a rank's own part needs no peer.
TEST(CopiedActivationsInParts, OwnPartsDoNotWaitForPeers) {
  std::promise<void> is_read;
  run_ranks(2, [&](RankContext& context) {
    PeerTensorParallel ranks(context.gloo("copies"), {.window_nbytes = 256});
    const at::Tensor part = at::full({4, 8}, context.rank + 1.0F);
    if (context.rank == 1) {
      const auto gather = ranks.start_gather_of_parts(part);
      EXPECT_TRUE(gather->part(1).equal(part));
      is_read.set_value();
      EXPECT_TRUE(gather->part(0).equal(at::full({4, 8}, 1.0F)));
    } else {
      ASSERT_EQ(
          is_read.get_future().wait_for(testing::kPeerTimeout),
          std::future_status::ready);
      ranks.all_gather(part);
    }
  });
}

}  // namespace
}  // namespace flatshard
