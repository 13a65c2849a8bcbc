#include "flatshard/layout/rectangle.h"

#include <gtest/gtest.h>

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
            "range [{}, {}) does not lie in a tensor of 6 elements",
            begin,
            end),
        [&, begin = begin, end = end] { rectangles(shape, begin, end); });
  }
}

/// The flat indices of a box in row-major order.
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

}  // namespace
}  // namespace flatshard
