#include "flatshard/core/error.h"
#include "flatshard/layout/flat_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace flatshard {
namespace {

std::vector<TensorSpec> three_matrices() {
  return {
      {"a", {64, 64}, Granularity::row(), 0},
      {"b", {96, 32}, Granularity::row(), 1},
      {"c", {32, 128}, Granularity::row(), 2}};
}

TEST(Segments, PartsShareNone) {
  auto specs = three_matrices();
  for (const std::int64_t shards : {1, 2, 3, 5, 8}) {
    const auto layout = FlatLayout::build(specs, shards, /*alignment=*/512);
    ASSERT_EQ(layout.segments().size(), 3);
    for (std::int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(layout.tensor_segment(i), i);
      EXPECT_EQ(layout.tensor_offset(i), layout.segments()[i].offset);
    }
  }
  for (TensorSpec& spec : specs) {
    spec.part = 0;
  }
  // Fine rows move into the segments of coarser ones.
  EXPECT_EQ(FlatLayout::build(specs, 1).segments().size(), 1);
}

TEST(Segments, ScalesAreCutWhereTheirElementsAre) {
  for (const std::int64_t shards : {1, 2, 3, 5, 8}) {
    const auto data =
        FlatLayout::build(three_matrices(), shards, /*alignment=*/512);
    const FlatLayout both = data.with_scales(32);
    EXPECT_EQ(both.numel(), data.numel() + data.numel() / 32);
    EXPECT_EQ(both.shard_numel() * shards, both.numel());
    ASSERT_EQ(both.num_tensors(), 6);
    EXPECT_EQ(both.spec(4).name, "b.scale");
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t shard = 0; shard < shards; ++shard) {
        const auto of_data = both.shard_pieces(i, shard);
        const auto of_scales = both.shard_pieces(3 + i, shard);
        EXPECT_EQ(of_data.size(), data.shard_pieces(i, shard).size());
        ASSERT_EQ(of_data.size(), of_scales.size());
        if (!of_data.empty()) {
          EXPECT_EQ(of_data[0].numel, of_scales[0].numel * 32);
          EXPECT_EQ(of_data[0].tensor_offset, of_scales[0].tensor_offset * 32);
        }
      }
    }
  }
  const auto odd = FlatLayout::build({{"a", {3, 48}, Granularity::row()}}, 2);
  EXPECT_THROW(odd.with_scales(32), Error);
}

TEST(Segments, OfSomeIsALayoutOfTheirOwn) {
  const auto layout = FlatLayout::build(three_matrices(), 3, /*alignment=*/512);
  const FlatLayout two = layout.of_segments(1, 2);
  ASSERT_EQ(two.segments().size(), 2);
  EXPECT_EQ(two.segments()[0].offset, 0);
  EXPECT_EQ(two.segments()[1].offset, layout.segments()[1].numel);
  EXPECT_EQ(
      two.numel(),
      layout.segments()[1].numel + layout.segments()[2].numel);
  EXPECT_EQ(two.segments()[1].local_offset, two.segments()[0].shard_numel);
  EXPECT_THROW(layout.of_segments(2, 2), Error);
}

}  // namespace
}  // namespace flatshard
