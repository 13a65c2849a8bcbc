#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "flatshard/comm/communicator.h"
#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

std::shared_ptr<Communicator> connect(const RankContext& context) {
  auto communicator = context.gloo("ep.exchange");
  communicator->set_log(context.log);
  return communicator;
}

/// rows[a][b][i]: how many rows rank a sends to rank b as part i.
using Counts = std::vector<std::vector<std::vector<std::int64_t>>>;

Counts draw_counts(std::mt19937& random, int world, int parts) {
  Counts counts(
      world,
      std::vector<std::vector<std::int64_t>>(
          world,
          std::vector<std::int64_t>(parts)));
  // Half of them are empty, and sometimes a rank sends none at all.
  for (auto& from : counts) {
    const bool silent = random() % 5 == 0;
    for (auto& to : from) {
      for (std::int64_t& rows : to) {
        rows = silent || random() % 2 == 0
                   ? 0
                   : static_cast<std::int64_t>(random() % 9);
      }
    }
  }
  return counts;
}

/// Encodes where a row comes from, where it goes, its part and its number.
double value_of(int from, int to, int part, std::int64_t row) {
  return ((from * 8 + to) * 4 + part) * 16 + static_cast<double>(row);
}

class RandomCounts : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RandomCounts, ::testing::Values(1, 2, 3, 4));

// Sent rows are ordered by peer and part, received rows by part and peer.
TEST_P(RandomCounts, RowsArriveAsTheyWereSent) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = connect(context);
    const int me = context.rank;
    const int world = context.world;
    std::mt19937 random(7);
    for (int round = 0; round < 12; ++round) {
      const int num_parts = 1 + round % 3;
      const Counts counts = draw_counts(random, world, num_parts);
      const at::ScalarType dtype = round % 2 == 0 ? at::kDouble : at::kInt;
      const std::int64_t width = round % 4;  // rows without elements, too
      std::vector<RowsOfPeer> sends;
      std::vector<RowsOfPeer> receives;
      std::vector<at::Tensor> sent{at::empty({0, width}, dtype)};
      std::vector<at::Tensor> expected{at::empty({0, width}, dtype)};
      std::int64_t begin = 0;
      for (int peer = 0; peer < world; ++peer) {
        for (int part = 0; part < num_parts; ++part) {
          const std::int64_t rows = counts[me][peer][part];
          sends.push_back({peer, begin, rows});
          begin += rows;
          for (std::int64_t row = 0; row < rows; ++row) {
            sent.push_back(
                at::full({1, width}, value_of(me, peer, part, row), dtype));
          }
        }
      }
      begin = 0;
      for (int part = 0; part < num_parts; ++part) {
        for (int peer = 0; peer < world; ++peer) {
          const std::int64_t rows = counts[peer][me][part];
          receives.push_back({peer, begin, rows});
          begin += rows;
          for (std::int64_t row = 0; row < rows; ++row) {
            expected.push_back(
                at::full({1, width}, value_of(peer, me, part, row), dtype));
          }
        }
      }
      const at::Tensor in = at::cat(sent);
      const at::Tensor out = at::full({begin + 1, width}, -1, dtype);
      communicator->all_to_all(out, in, receives, sends);
      EXPECT_TRUE(out.narrow(0, 0, begin).equal(at::cat(expected))) << round;
      EXPECT_TRUE(out.narrow(0, begin, 1).eq(-1).all().item<bool>());
    }
    // Sizes differ between the ranks, and what is launched does not.
    for (const CollectiveRecord& record : context.log->records()) {
      EXPECT_EQ(record.kind, CollectiveKind::all_to_all);
      EXPECT_EQ(record.numel, record.seq % 4);
    }
    EXPECT_EQ(context.log->records().size(), 12);
  });
}

// It neither sends nor receives, but still joins the collective.
TEST(AllToAll, M7_ARankWithoutRowsTakesPart) {
  run_ranks(3, [](RankContext& context) {
    const auto communicator = connect(context);
    const at::Tensor in = at::full({2}, context.rank);
    for (int idle = 0; idle < 3; ++idle) {
      const at::Tensor out = at::full({2}, -1);
      std::vector<RowsOfPeer> parts;
      for (int peer = 0; peer < 3; ++peer) {
        if (context.rank != idle && peer != idle) {
          parts.push_back({peer, static_cast<std::int64_t>(parts.size()), 1});
        }
      }
      communicator->all_to_all(out, in, parts, parts);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        EXPECT_EQ(out[static_cast<std::int64_t>(i)].item<int>(), parts[i].peer);
      }
    }
    // All have launched equally many, and all join the next one.
    EXPECT_EQ(context.log->records().size(), 3);
    const at::Tensor sum = at::ones({1});
    communicator->all_reduce(sum, ReduceOp::sum);
    EXPECT_EQ(sum.item<float>(), 3);
  });
}

TEST(AllToAll, RanksThatSendRowsOfAnotherSizeAreNamed) {
  run_ranks(2, [](RankContext& context) {
    const auto communicator = connect(context);
    const std::int64_t width = 3 + context.rank;
    const at::Tensor in = at::ones({2, width});
    const at::Tensor out = at::empty({2, width});
    const std::vector<RowsOfPeer> parts{{0, 0, 1}, {1, 1, 1}};
    EXPECT_THAT(
        message_of([&] { communicator->all_to_all(out, in, parts, parts); }),
        HasSubstr("rank 1 issues another size at ep.exchange #0: it is in step "
                  "0: all_to_all of rows of 4 Float, rank 0 in step 0: "
                  "all_to_all of rows of 3 Float"));
  });
}

TEST(AllToAll, RefusesBadArgumentsByName) {
  run_ranks(1, [](RankContext& context) {
    const auto communicator = connect(context);
    const auto send = [&](const at::Tensor& out,
                          const at::Tensor& in,
                          const std::vector<RowsOfPeer>& receives,
                          const std::vector<RowsOfPeer>& sends) {
      return message_of(
          [&] { communicator->all_to_all(out, in, receives, sends); });
    };
    const at::Tensor rows = at::ones({4, 2});
    EXPECT_THAT(
        send(at::ones({4, 3}), rows, {}, {}),
        HasSubstr("expected rows alike, got Float [4, 3] (out) and Float [4, "
                  "2] (in)"));
    EXPECT_THAT(
        send(at::ones({4, 2}, at::kInt), rows, {}, {}),
        HasSubstr("expected rows alike"));
    EXPECT_THAT(send(rows, rows, {}, {}), HasSubstr("out must not overlap in"));
    const at::Tensor out = at::ones({4, 2});
    EXPECT_THAT(
        send(out, rows, {}, {{0, 2, 3}}),
        HasSubstr("sends: expected rows below 4 and ranks below 1, got rows 2 "
                  "to 5 of rank 0"));
    EXPECT_THAT(
        send(out, rows, {{1, 0, 1}}, {}),
        HasSubstr("receives: expected rows below 4 and ranks below 1, got "
                  "rows 0 to 1 of rank 1"));
  });
}

}  // namespace
}  // namespace flatshard
