#include "flatshard/exchange/row_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

namespace flatshard {
namespace {

constexpr int kRanks = 3;
constexpr int kLocal = 2;
constexpr int kExperts = kRanks * kLocal;

std::vector<int> random_counts() {
  std::mt19937 random(7);
  std::vector<int> counts(kRanks * kExperts);
  for (int& count : counts) {
    count = static_cast<int>(random() % 4);  // none included
  }
  return counts;
}

/// A row, given by the rank that routed it and its number there.
struct Row {
  int rank = 0;
  int expert = 0;
  std::int64_t at_home = 0;
};

/// Returns every row of the experts of `rank`, in the order of arrival.
std::vector<Row> arriving_at(int rank, const std::vector<int>& counts) {
  std::vector<Row> rows;
  for (int r = 0; r < kRanks; ++r) {
    std::int64_t at_home = 0;
    for (int expert = 0; expert < kExperts; ++expert) {
      for (int i = 0; i < counts[r * kExperts + expert]; ++i) {
        rows.push_back({r, expert, at_home++});
      }
    }
  }
  std::erase_if(rows, [&](const Row& row) {
    return row.expert / kLocal != rank;
  });
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::tie(a.expert, a.rank) < std::tie(b.expert, b.rank);
  });
  return rows;
}

TEST(RowRuns, AreTheRowsOneByOne) {
  const std::vector<int> counts = random_counts();
  for (int rank = 0; rank < kRanks; ++rank) {
    const RowRuns runs(counts, kRanks, rank);
    const std::vector<Row> expected = arriving_at(rank, counts);
    ASSERT_EQ(runs.num_arriving(), static_cast<std::int64_t>(expected.size()));
    std::int64_t stays = 0;
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_EQ(runs.of(r).size(), static_cast<std::size_t>(kLocal));
      for (const RowRuns::Run& run : runs.of(r)) {
        for (std::int64_t i = 0; i < run.rows; ++i) {
          const Row& row = expected.at(run.at_experts + i);
          EXPECT_EQ(row.rank, r);
          EXPECT_EQ(row.at_home, run.at_home + i);
          if (r == rank) {
            EXPECT_GE(row.at_home, runs.stay_begin());
            EXPECT_LT(row.at_home, runs.stay_end());
            ++stays;
          }
        }
      }
    }
    EXPECT_EQ(runs.stay_end() - runs.stay_begin(), stays);
  }
}

TEST(RowRuns, CountWhatRanksRouted) {
  //                        rank 0's   rank 1's experts
  const std::vector<int> counts{
      1,
      0,
      /**/ 2,
      1,  // of rank 0
      5,
      1,
      /**/ 0,
      3};  // of rank 1
  const RowRuns runs(counts, 2, 0);
  EXPECT_EQ(runs.num_routed(), 4);
  EXPECT_EQ(runs.most_routed(), 9);
  EXPECT_EQ(runs.num_arriving(), 7);
  EXPECT_EQ(runs.stay_begin(), 0);
  EXPECT_EQ(runs.stay_end(), 1);
}

// See RunTables and the kernels that read them.
TEST(RowRuns, Tables) {
  const std::vector<int> counts{1, 0, 2, 1, 5, 1, 0, 3};
  const RowRuns runs(counts, 2, 1);
  for (const bool ends_by_rank : {false, true}) {
    const RunTables tables(2, 2, ends_by_rank);
    std::vector<int> written(tables.numel(), -1);
    runs.write(tables, written);
    std::vector<int> expected =
        ends_by_rank ? std::vector<int>{2, 2, 3, 6} : std::vector<int>{2, 6};
    expected.insert(
        expected.end(),
        {6,
         6,
         9,  // of rank 1's own runs: at home, and where they end
         2,
         3,
         -1,
         0,
         2,
         2,
         3,
         6,  // of all: at the experts, and how many
         1,
         6,
         3,
         6,
         -1});
    EXPECT_EQ(written, expected);
  }
}

}  // namespace
}  // namespace flatshard
