#include "flatshard/layout/tensor_slice.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/layout/expect_error.h"

namespace flatshard {
namespace {

using Shape = std::vector<std::int64_t>;
using Boxes = std::vector<Rectangle>;

std::int64_t product(const Shape& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    numel *= size;
  }
  return numel;
}

TEST(TensorSlice, NothingIsCutByDefault) {
  const TensorSlice slice;
  const Shape shape{4, 6};
  slice.check(shape, "w");
  EXPECT_EQ(slice.whole_shape(shape), shape);
  EXPECT_TRUE(slice.is_whole(shape));
  EXPECT_EQ(slice.boxes(shape, 0, 24), (Boxes{{{0, 0}, {4, 6}}}));
  EXPECT_EQ(slice.boxes(Shape{}, 0, 1), (Boxes{{{}, {}}}));
}

TEST(TensorSlice, AnEqualPartOfADimension) {
  const TensorSlice row_parallel = TensorSlice().cut(1, 1, 2);
  const Shape shape{4, 3};  // of [4, 6]
  EXPECT_EQ(row_parallel.whole_shape(shape), (Shape{4, 6}));
  EXPECT_FALSE(row_parallel.is_whole(shape));
  EXPECT_EQ(row_parallel.boxes(shape, 0, 12), (Boxes{{{0, 3}, {4, 3}}}));
  EXPECT_EQ(
      row_parallel.boxes(shape, 2, 7),
      (Boxes{{{0, 5}, {1, 1}}, {{1, 3}, {1, 3}}, {{2, 3}, {1, 1}}}));
  // The same slice of a tensor of another size.
  EXPECT_EQ(row_parallel.whole_shape(Shape{2, 5}), (Shape{2, 10}));
  EXPECT_TRUE(TensorSlice().cut(1, 0, 1).is_whole(shape));
}

TEST(TensorSlice, APartOfEachSection) {
  // Gate and up, one after the other: [8, 2] of which each rank has half.
  const TensorSlice second = TensorSlice().cut(0, 1, 2, 2);
  const Shape shape{4, 2};
  EXPECT_EQ(second.whole_shape(shape), (Shape{8, 2}));
  EXPECT_EQ(
      second.boxes(shape, 0, 8),
      (Boxes{{{2, 0}, {2, 2}}, {{6, 0}, {2, 2}}}));
  EXPECT_EQ(
      second.boxes(shape, 3, 6),
      (Boxes{{{3, 1}, {1, 1}}, {{6, 0}, {1, 2}}}));
  // With one part, sections that touch are one box.
  EXPECT_EQ(
      TensorSlice().cut(0, 0, 1, 2).boxes(shape, 0, 8),
      (Boxes{{{0, 0}, {4, 2}}}));
}

TEST(TensorSlice, ExpertsThatAreCutInTheirWidth) {
  // [4, 4, 3]: the second half of four experts, of gate and up one row each.
  const TensorSlice slice = TensorSlice().cut(1, 0, 2, 2).take(0, 4, {{2, 4}});
  const Shape shape{2, 2, 3};
  slice.check(shape, "experts");
  EXPECT_EQ(slice.whole_shape(shape), (Shape{4, 4, 3}));
  EXPECT_EQ(
      slice.boxes(shape, 0, 12),
      (Boxes{
          {{2, 0, 0}, {1, 1, 3}},
          {{2, 2, 0}, {1, 1, 3}},
          {{3, 0, 0}, {1, 1, 3}},
          {{3, 2, 0}, {1, 1, 3}}}));
}

TEST(TensorSlice, PartsMayBeUneven) {
  const TensorSlice last = TensorSlice().take(0, 10, {{8, 10}});
  EXPECT_EQ(last.whole_shape(Shape{2, 3}), (Shape{10, 3}));
  EXPECT_EQ(last.boxes(Shape{2, 3}, 0, 6), (Boxes{{{8, 0}, {2, 3}}}));
  // Three sections of different lengths, as of q, k and v.
  const TensorSlice fused = TensorSlice().take(0, 8, {{2, 4}, {5, 6}, {7, 8}});
  EXPECT_EQ(
      fused.boxes(Shape{4}, 1, 4),
      (Boxes{{{3}, {1}}, {{5}, {1}}, {{7}, {1}}}));
}

TEST(TensorSlice, WhatCannotBeIsRefused) {
  const auto refused = [](const std::string& text, auto&& action) {
    expect_error(ErrorCode::config, text, action);
  };
  refused("got part 2 of 2 in 1 sections", [] { TensorSlice().cut(0, 2, 2); });
  refused("dimension 1 is already split", [] {
    TensorSlice().cut(1, 0, 2).cut(1, 0, 2);
  });
  refused("expected a dimension counted from 0, got -1", [] {
    TensorSlice().cut(-1, 0, 2);
  });
  refused("ascending ranges within the 4 of the full tensor, got [3, 5)", [] {
    TensorSlice().take(0, 4, {{3, 5}});
  });
  refused("ascending ranges within the 4 of the full tensor, got [0, 1)", [] {
    TensorSlice().take(0, 4, {{2, 3}, {0, 1}});
  });
  const auto check = [](const TensorSlice& slice) {
    slice.check(Shape{3, 4}, "w");
  };
  refused(
      "w: expected a dimension 2 to be a slice along, got shape [3, 4]",
      [&] { check(TensorSlice().cut(2, 0, 2)); });
  refused(
      "w: expected a multiple of 2 in dimension 0 of this rank's slice, got "
      "shape [3, 4]",
      [&] { check(TensorSlice().cut(0, 0, 2, 2)); });
  refused(
      "w: expected a size of 2 in dimension 1 of this rank's slice, got shape "
      "[3, 4]",
      [&] {
        check(TensorSlice().take(1, 8, {{0, 2}}));
      });
}

/// Returns the elements of a rank's tensor: flat indices of the larger tensor.
std::vector<std::int64_t> elements_of_slice(
    const std::vector<std::vector<std::int64_t>>& indices,
    const Shape& whole) {
  std::vector<std::int64_t> flat{0};
  for (std::size_t d = 0; d < whole.size(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t base : flat) {
      for (const std::int64_t index : indices[d]) {
        next.push_back(base * whole[d] + index);
      }
    }
    flat = std::move(next);
  }
  return flat;
}

TEST(TensorSliceProperty, BoxesAreTheElementsInOrder) {
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 3000; ++trial) {
    const std::size_t ndim = random() % 4;
    TensorSlice slice;
    Shape shape;
    Shape whole;
    std::vector<std::vector<std::int64_t>> indices(ndim);
    bool one_box = true;
    for (std::size_t d = 0; d < ndim; ++d) {
      const auto dim = static_cast<std::int64_t>(d);
      const auto size = static_cast<std::int64_t>(1 + random() % 5);
      const auto parts = static_cast<std::int64_t>(1 + random() % 3);
      const auto part = static_cast<std::int64_t>(random() % parts);
      switch (random() % 3) {
        case 0:  // whole
          whole.push_back(size);
          for (std::int64_t i = 0; i < size; ++i) {
            indices[d].push_back(i);
          }
          break;
        case 1: {  // equal parts of sections
          const auto sections = static_cast<std::int64_t>(1 + random() % 2);
          whole.push_back(size * parts * sections);
          for (std::int64_t s = 0; s < sections; ++s) {
            for (std::int64_t i = 0; i < size; ++i) {
              indices[d].push_back((s * parts + part) * size + i);
            }
          }
          one_box = one_box && (sections == 1 || parts == 1);
          slice = slice.cut(dim, part, parts, sections);
          break;
        }
        default: {  // any indices
          whole.push_back(2 * size);
          std::vector<IndexRange> ranges;
          for (std::int64_t i = 0; i < 2 * size; ++i) {
            if (random() % 2 == 0) {
              indices[d].push_back(i);
              ranges.push_back({i, i + 1});
            }
          }
          one_box = false;
          slice = slice.take(dim, 2 * size, ranges);
        }
      }
      shape.push_back(static_cast<std::int64_t>(indices[d].size()));
    }
    slice.check(shape, "w");
    ASSERT_EQ(slice.whole_shape(shape), whole);
    const auto elements = elements_of_slice(indices, whole);
    const std::int64_t numel = product(shape);
    ASSERT_EQ(static_cast<std::int64_t>(elements.size()), numel);
    const auto begin = static_cast<std::int64_t>(random() % (numel + 1));
    const auto end =
        begin + static_cast<std::int64_t>(random() % (numel - begin + 1));
    std::int64_t next = begin;
    const auto boxes = slice.boxes(shape, begin, end);
    if (one_box) {
      EXPECT_LE(boxes.size(), std::max<std::size_t>(1, 2 * ndim - 1));
    }
    for (const Rectangle& box : boxes) {
      ASSERT_TRUE(box.lies_in(whole));
      const FlatRuns runs(whole, box);
      for_each_run(
          runs,
          0,
          box.numel(),
          [&](std::int64_t from, std::int64_t, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
              ASSERT_EQ(from + i, elements.at(next++));
            }
          });
    }
    ASSERT_EQ(next, end);
  }
}

}  // namespace
}  // namespace flatshard
