#include "flatshard/layout/rectangle.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "tests/layout/expect_error.h"

namespace flatshard {
namespace {

using Shape = std::vector<std::int64_t>;
using Rectangles = std::vector<Rectangle>;

TEST(Rectangles, OfAMatrix) {
  const Shape shape{4, 5};
  EXPECT_EQ(rectangles(shape, 0, 20), (Rectangles{{{0, 0}, {4, 5}}}));
  EXPECT_EQ(rectangles(shape, 5, 15), (Rectangles{{{1, 0}, {2, 5}}}));
  EXPECT_EQ(rectangles(shape, 6, 9), (Rectangles{{{1, 1}, {1, 3}}}));
  EXPECT_EQ(
      rectangles(shape, 3, 17),
      (Rectangles{{{0, 3}, {1, 2}}, {{1, 0}, {2, 5}}, {{3, 0}, {1, 2}}}));
  EXPECT_EQ(
      rectangles(shape, 3, 7),
      (Rectangles{{{0, 3}, {1, 2}}, {{1, 0}, {1, 2}}}));
  EXPECT_EQ(rectangles(shape, 7, 7), Rectangles{});
}

TEST(Rectangles, OfScalarsVectorsAndEmptyTensors) {
  EXPECT_EQ(rectangles(Shape{}, 0, 1), (Rectangles{{{}, {}}}));
  EXPECT_EQ(rectangles(Shape{}, 0, 1).front().numel(), 1);
  EXPECT_EQ(rectangles(Shape{}, 1, 1), Rectangles{});
  EXPECT_EQ(rectangles(Shape{9}, 2, 6), (Rectangles{{{2}, {4}}}));
  EXPECT_EQ(rectangles(Shape{3, 0}, 0, 0), Rectangles{});
}

TEST(Rectangles, RefusesRangesOutsideTheTensor) {
  const Shape shape{2, 3};
  for (const auto& [begin, end] :
       {std::pair<int, int>{-1, 2}, {0, 7}, {4, 3}}) {
    expect_error(
        ErrorCode::usage,
        fmt::format(
            "range [{}, {}) is not in a tensor of 6 elements",
            begin,
            end),
        [&, begin = begin, end = end] { rectangles(shape, begin, end); });
  }
}

/// Returns the flat indices of a box in row-major order.
std::vector<std::int64_t> elements_of(
    const Rectangle& box,
    const Shape& shape) {
  std::vector<std::int64_t> flat{0};
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<std::int64_t> next;
    for (const std::int64_t base : flat) {
      for (std::int64_t j = 0; j < box.length[dim]; ++j) {
        next.push_back(base * shape[dim] + box.start[dim] + j);
      }
    }
    flat = std::move(next);
  }
  return flat;
}

TEST(RectanglesProperty, CoverTheRangeInOrderWithFewBoxes) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 3000; ++trial) {
    Shape shape(random() % 5);
    std::int64_t numel = 1;
    for (std::int64_t& size : shape) {
      size = 1 + static_cast<std::int64_t>(random() % 5);
      numel *= size;
    }
    const auto begin = static_cast<std::int64_t>(random() % (numel + 1));
    const auto end =
        begin + static_cast<std::int64_t>(random() % (numel - begin + 1));
    const Rectangles boxes = rectangles(shape, begin, end);
    EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
    std::int64_t expected = begin;
    for (const Rectangle& box : boxes) {
      EXPECT_GT(box.numel(), 0);
      for (const std::int64_t element : elements_of(box, shape)) {
        ASSERT_EQ(element, expected++);
      }
    }
    ASSERT_EQ(expected, end);
  }
}

TEST(Rectangles, LieInATensorAndMeet) {
  const Shape shape{4, 5};
  EXPECT_EQ(Rectangle::whole(shape), (Rectangle{{0, 0}, {4, 5}}));
  EXPECT_TRUE((Rectangle{{1, 2}, {3, 3}}.lies_in(shape)));
  EXPECT_FALSE((Rectangle{{1, 3}, {3, 3}}.lies_in(shape)));
  EXPECT_FALSE((Rectangle{{-1, 0}, {1, 1}}.lies_in(shape)));
  EXPECT_FALSE((Rectangle{{1}, {1}}.lies_in(shape)));
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE((Rectangle{{1, 1}, {1, kMost}}.lies_in(shape)));
  const Rectangle box{{1, 1}, {2, 3}};
  EXPECT_EQ(box.intersection({{2, 0}, {2, 2}}), (Rectangle{{2, 1}, {1, 1}}));
  EXPECT_EQ(box.intersection({{3, 0}, {1, 5}}).numel(), 0);
  EXPECT_EQ(to_string(box), "[1:3, 1:4]");
  EXPECT_EQ(to_string(Rectangle{}), "[]");
}

TEST(FlatRuns, AreTheLongestPossible) {
  const Shape shape{4, 5, 2};
  const FlatRuns whole(shape, Rectangle::whole(shape));
  EXPECT_EQ(whole.size(), 1);
  EXPECT_EQ(whole.numel(), 40);
  const FlatRuns rows(shape, {{1, 0, 0}, {2, 5, 2}});
  EXPECT_EQ(rows.size(), 1);
  EXPECT_EQ(rows.begin(0), 10);
  EXPECT_EQ(rows.numel(), 20);
  const FlatRuns columns(shape, {{1, 2, 0}, {3, 2, 2}});
  EXPECT_EQ(columns.size(), 3);
  EXPECT_EQ(columns.numel(), 4);
  EXPECT_EQ(columns.begin(2), 34);
  EXPECT_EQ(FlatRuns(shape, {{1, 2, 0}, {3, 0, 2}}).size(), 0);
  EXPECT_EQ(FlatRuns(Shape{}, {}).numel(), 1);
}

TEST(FlatRunsProperty, AreTheElementsOfTheBox) {
  std::mt19937_64 random(9);
  for (int trial = 0; trial < 2000; ++trial) {
    Shape shape(random() % 5);
    Rectangle box;
    for (std::int64_t& size : shape) {
      size = 1 + static_cast<std::int64_t>(random() % 4);
      box.start.push_back(static_cast<std::int64_t>(random() % size));
      box.length.push_back(
          static_cast<std::int64_t>(random() % (size - box.start.back() + 1)));
    }
    const FlatRuns runs(shape, box);
    EXPECT_EQ(runs.size() == 0 ? 0 : runs.size() * runs.numel(), box.numel());
    const auto expected = elements_of(box, shape);
    const std::int64_t numel = box.numel();
    const auto first = static_cast<std::int64_t>(random() % (numel + 1));
    const auto last =
        first + static_cast<std::int64_t>(random() % (numel - first + 1));
    std::int64_t next = first;
    for_each_run(
        runs,
        first,
        last,
        [&](std::int64_t from, std::int64_t at, std::int64_t n) {
          ASSERT_EQ(at, next);
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(from + i, expected.at(next++));
          }
        });
    ASSERT_EQ(next, last);
  }
}

}  // namespace
}  // namespace flatshard
