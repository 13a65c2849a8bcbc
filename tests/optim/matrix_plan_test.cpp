#include "flatshard/optim/muon/matrix_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;

/// Appends a run of elements of a matrix as boxes that are contiguous in it.
void append_run(
    std::vector<MatrixBox>& boxes,
    std::int64_t matrix,
    const MatrixShape& shape,
    std::int64_t begin,
    std::int64_t end) {
  while (begin < end) {
    const std::int64_t row = begin / shape.columns;
    const std::int64_t column = begin % shape.columns;
    const std::int64_t rows = column > 0 ? 0 : (end - begin) / shape.columns;
    if (rows > 0) {
      boxes.push_back({matrix, row, 0, rows, shape.columns});
      begin += rows * shape.columns;
    } else {
      const std::int64_t n = std::min(shape.columns - column, end - begin);
      boxes.push_back({matrix, row, column, 1, n});
      begin += n;
    }
  }
}

struct RandomCase {
  std::vector<MatrixShape> matrices;
  std::vector<std::vector<MatrixBox>> boxes;
};

/// Every matrix is split at random: by elements, by columns, or not at all.
RandomCase random_case(std::mt19937& random) {
  const auto draw = [&](int first, int last) {
    return std::uniform_int_distribution<>(first, last)(random);
  };
  RandomCase result;
  const int num_ranks = draw(1, 5);
  result.boxes.resize(num_ranks);
  const int num_matrices = draw(1, 12);
  for (int m = 0; m < num_matrices; ++m) {
    const MatrixShape shape = m > 0 && draw(0, 1) == 0
                                  ? result.matrices.back()
                                  : MatrixShape{draw(1, 9), draw(1, 9)};
    result.matrices.push_back(shape);
    const int way = draw(0, 2);
    const std::int64_t total = way == 1 ? shape.columns : shape.numel();
    std::vector<std::int64_t> edges{0, total};
    for (int i = 1; i < num_ranks; ++i) {
      edges.push_back(way == 2 ? 0 : draw(0, static_cast<int>(total)));
    }
    std::sort(edges.begin(), edges.end());
    const int first = draw(0, num_ranks - 1);  // who has the first part
    for (int i = 0; i < num_ranks; ++i) {
      auto& boxes = result.boxes[(first + i) % num_ranks];
      if (way != 1) {
        append_run(boxes, m, shape, edges[i], edges[i + 1]);
      } else if (edges[i] < edges[i + 1]) {
        boxes.push_back({m, 0, edges[i], shape.rows, edges[i + 1] - edges[i]});
      }
    }
  }
  return result;
}

/// A different number for each element of all matrices.
std::int64_t id_of(std::int64_t matrix, std::int64_t row, std::int64_t column) {
  return (matrix * 100 + row) * 100 + column + 1;
}

using Buffer = std::vector<std::int64_t>;

void move(
    const std::vector<MatrixTransfer>& sends,
    const Buffer& from,
    int sender,
    int receiver,
    const std::vector<MatrixTransfer>& receives,
    Buffer& to,
    std::int64_t& moved) {
  std::vector<MatrixTransfer> in;
  std::copy_if(
      receives.begin(),
      receives.end(),
      std::back_inserter(in),
      [&](const MatrixTransfer& t) { return t.peer == sender; });
  std::size_t next = 0;
  for (const MatrixTransfer& out : sends) {
    if (out.peer != receiver) {
      continue;
    }
    ASSERT_LT(next, in.size());
    ASSERT_EQ(in[next].numel, out.numel);
    for (std::int64_t i = 0; i < out.numel; ++i) {
      std::int64_t& element = to.at(in[next].begin + i);
      EXPECT_EQ(element, 0) << "an element arrives twice";
      element = from.at(out.begin + i);
    }
    moved += sender == receiver ? 0 : out.numel;
    ++next;
  }
  EXPECT_EQ(next, in.size());
}

void copy_staged(
    const std::vector<MatrixShape>& matrices,
    const MatrixExchange& exchange,
    Buffer& buffer,
    bool into_matrices) {
  for (const MatrixExchange::Staged& staged : exchange.staged) {
    const MatrixBox& b = staged.box;
    for (std::int64_t r = 0; r < b.rows; ++r) {
      for (std::int64_t c = 0; c < b.columns; ++c) {
        std::int64_t& apart = buffer.at(staged.begin + r * b.columns + c);
        std::int64_t& inside = buffer.at(
            staged.matrix_begin + (b.row + r) * matrices[b.matrix].columns +
            b.column + c);
        (into_matrices ? inside : apart) = into_matrices ? apart : inside;
      }
    }
  }
}

TEST(MatrixPlan, RandomPlansMoveEachElementOnceAndBack) {
  std::mt19937 random(67);
  for (int round = 0; round < 300; ++round) {
    const RandomCase c = random_case(random);
    const auto plan = MatrixPlan::build(c.matrices, c.boxes);
    const int n = plan.num_ranks();
    std::vector<bool> active;
    for (std::size_t m = 0; m < c.matrices.size(); ++m) {
      active.push_back(round % 2 == 0 || random() % 3 != 0);
    }
    std::vector<MatrixExchange> exchanges;
    std::vector<Buffer> boxes;
    std::vector<Buffer> matrices;
    for (int rank = 0; rank < n; ++rank) {
      exchanges.push_back(plan.exchange(rank, active));
      const MatrixExchange& e = exchanges.back();
      boxes.emplace_back(e.boxes_numel);
      matrices.emplace_back(e.matrices_numel);
      for (std::size_t i = 0; i < c.boxes[rank].size(); ++i) {
        const MatrixBox& b = c.boxes[rank][i];
        ASSERT_EQ(e.begin_of_box[i] >= 0, active[b.matrix]);
        for (std::int64_t k = 0; active[b.matrix] && k < b.numel(); ++k) {
          boxes.back().at(e.begin_of_box[i] + k) =
              id_of(b.matrix, b.row + k / b.columns, b.column + k % b.columns);
        }
      }
    }
    std::vector<std::int64_t> moved(n, 0);
    for (int from = 0; from < n; ++from) {
      for (int to = 0; to < n; ++to) {
        move(
            exchanges[from].sends,
            boxes[from],
            from,
            to,
            exchanges[to].receives,
            matrices[to],
            moved[from]);
      }
    }
    std::int64_t num_owned = 0;
    for (int rank = 0; rank < n; ++rank) {
      const MatrixExchange& e = exchanges[rank];
      if (round % 2 == 0) {
        EXPECT_EQ(moved[rank], plan.sent_numel(rank));
      }
      copy_staged(c.matrices, e, matrices[rank], true);
      for (const MatrixExchange::Owned& owned : e.owned) {
        EXPECT_EQ(plan.owner(owned.matrix), rank);
        EXPECT_TRUE(active[owned.matrix]);
        const MatrixShape& shape = c.matrices[owned.matrix];
        for (std::int64_t k = 0; k < shape.numel(); ++k) {
          ASSERT_EQ(
              matrices[rank].at(owned.begin + k),
              id_of(owned.matrix, k / shape.columns, k % shape.columns));
          matrices[rank][owned.begin + k] *= -1;
        }
        ++num_owned;
      }
      copy_staged(c.matrices, e, matrices[rank], false);
    }
    EXPECT_EQ(num_owned, std::count(active.begin(), active.end(), true));
    for (int to = 0; to < n; ++to) {
      Buffer back(boxes[to].size());
      for (int from = 0; from < n; ++from) {
        std::int64_t ignored = 0;
        move(
            exchanges[from].receives,
            matrices[from],
            from,
            to,
            exchanges[to].sends,
            back,
            ignored);
      }
      for (std::size_t i = 0; i < back.size(); ++i) {
        ASSERT_EQ(back[i], -boxes[to][i]);
      }
    }
  }
}

TEST(MatrixPlan, LoadsAreEqualWithinTheLargestMatrix) {
  std::mt19937 random(68);
  for (int round = 0; round < 100; ++round) {
    const RandomCase c = random_case(random);
    const auto plan = MatrixPlan::build(c.matrices, c.boxes);
    std::int64_t total = 0;
    std::int64_t largest = 0;
    for (std::size_t m = 0; m < c.matrices.size(); ++m) {
      total += plan.cost(static_cast<std::int64_t>(m));
      largest = std::max(largest, plan.cost(static_cast<std::int64_t>(m)));
    }
    const std::int64_t share = total / plan.num_ranks();
    std::int64_t sum = 0;
    for (int rank = 0; rank < plan.num_ranks(); ++rank) {
      sum += plan.loads()[rank];
      EXPECT_LE(plan.loads()[rank], share + share / 10 + largest);
    }
    EXPECT_EQ(sum, total);
  }
}

TEST(MatrixPlan, MatricesStayWithTheirHolders) {
  // Experts that are sharded one by one: nothing moves.
  const std::vector<MatrixShape> experts(8, {6, 4});
  std::vector<std::vector<MatrixBox>> boxes(4);
  for (std::int64_t e = 0; e < 8; ++e) {
    boxes[e / 2].push_back({e, 0, 0, 6, 4});
  }
  const auto plan = MatrixPlan::build(experts, boxes);
  EXPECT_TRUE(plan.is_local());
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan.sent_numel(rank), 0);
  }
  EXPECT_EQ(plan.cost(0), 16 * (2 * 6 + 4));
}

TEST(MatrixPlan, EqualArgumentsGiveEqualPlans) {
  std::mt19937 random(69);
  const RandomCase c = random_case(random);
  const auto plan = MatrixPlan::build(c.matrices, c.boxes);
  EXPECT_EQ(plan.hash(), MatrixPlan::build(c.matrices, c.boxes).hash());
  const RandomCase other = random_case(random);
  EXPECT_NE(plan.hash(), MatrixPlan::build(other.matrices, other.boxes).hash());
}

TEST(MatrixPlan, RefusesElementsThatAreMissingOrStoredTwice) {
  const auto message = [](std::vector<std::vector<MatrixBox>> boxes) {
    try {
      MatrixPlan::build({{2, 3}}, std::move(boxes));
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(message({{{0, 0, 0, 1, 3}}}), HasSubstr("got 3 elements"));
  EXPECT_THAT(
      message({{{0, 0, 0, 2, 2}}, {{0, 1, 1, 1, 2}}}),
      HasSubstr("some of them twice"));
  EXPECT_THAT(message({{{0, 0, 0, 3, 3}}}), HasSubstr("is not in matrix 0"));
}

}  // namespace
}  // namespace flatshard
