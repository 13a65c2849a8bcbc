#include "flatshard/layout/flat_layout.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/layout/expect_error.h"

namespace flatshard {
namespace {

using Offsets = std::vector<std::int64_t>;

Offsets offsets_of(const FlatLayout& layout) {
  Offsets offsets;
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    offsets.push_back(layout.tensor_offset(i));
  }
  return offsets;
}

TEST(FlatLayout, ElementGranularityIsOneSegmentInGivenOrder) {
  const FlatLayout layout = FlatLayout::build(
      {{"a", {4, 5}}, {"scalar", {}}, {"none", {3, 0}}, {"b", {3, 3, 3}}},
      3);
  EXPECT_EQ(offsets_of(layout), (Offsets{0, 32, 33, 48}));
  ASSERT_EQ(layout.segments().size(), 1u);
  EXPECT_EQ(layout.shard_numel(), 32);  // 75 elements over 3, up to 16
  EXPECT_EQ(layout.numel(), 96);
  EXPECT_EQ(layout.num_shards(), 3);
  EXPECT_EQ(layout.padding_numel(), 96 - 48);
  EXPECT_DOUBLE_EQ(layout.padding_ratio(), 1.0);
  EXPECT_EQ(
      layout.padding_ranges(),
      (std::vector<FlatRange>{{20, 12}, {33, 15}, {75, 21}}));
}

TEST(FlatLayout, PiecesOfShards) {
  const FlatLayout layout =
      FlatLayout::build({{"a", {40}}, {"b", {8}}, {"none", {0}}}, 2);
  ASSERT_EQ(layout.shard_numel(), 32);
  EXPECT_EQ(layout.shard_pieces(0, 0), (std::vector<Piece>{{0, 0, 32}}));
  EXPECT_EQ(layout.shard_pieces(0, 1), (std::vector<Piece>{{32, 0, 8}}));
  EXPECT_EQ(layout.shard_pieces(1, 0), std::vector<Piece>{});
  EXPECT_EQ(layout.shard_pieces(1, 1), (std::vector<Piece>{{0, 16, 8}}));
  EXPECT_EQ(layout.shard_pieces(2, 0), std::vector<Piece>{});
  EXPECT_EQ(
      layout.shard_pieces(1, ShardSpan{0, 2}),
      (std::vector<Piece>{{0, 48, 8}}));
}

TEST(FlatLayout, R16_RowGranularityHasOneSegmentPerWidth) {
  const FlatLayout layout = FlatLayout::build(
      {{"a", {5, 32}, Granularity::row()},
       {"bias", {7}, Granularity::row()},
       {"experts", {2, 4, 48}, Granularity::row()},
       {"b", {3, 32}, Granularity::row()}},
      4);
  ASSERT_EQ(layout.segments().size(), 3u);
  EXPECT_EQ(layout.segments()[0].granule, 32);
  EXPECT_EQ(layout.segments()[0].shard_numel, 64);  // 8 rows: 2 each
  EXPECT_EQ(layout.segments()[1].granule, 16);      // lcm(1, 16)
  EXPECT_EQ(layout.segments()[1].shard_numel, 16);
  EXPECT_EQ(layout.segments()[2].granule, 48);
  EXPECT_EQ(layout.segments()[2].shard_numel, 96);  // 8 rows: 2 each
  EXPECT_EQ(layout.segments()[1].offset, 256);
  EXPECT_EQ(layout.segments()[2].offset, 320);
  EXPECT_EQ(layout.segments()[1].local_offset, 64);
  EXPECT_EQ(layout.segments()[2].local_offset, 80);
  EXPECT_EQ(layout.shard_numel(), 176);
  EXPECT_EQ(offsets_of(layout), (Offsets{0, 256, 320, 160}));
  EXPECT_EQ(layout.tensor_segment(2), 2);
  // Rows 2 and 3 of `experts` follow 2 rows of segment 0 and 16 elements.
  EXPECT_EQ(layout.shard_pieces(2, 1), (std::vector<Piece>{{96, 80, 96}}));
  EXPECT_EQ(layout.shard_pieces(1, 3), std::vector<Piece>{});
  EXPECT_EQ(
      layout.shard_pieces(2, ShardSpan{2, 2}),
      (std::vector<Piece>{{192, 160, 192}}));
}

TEST(FlatLayout, FinerRowsFillTheRoomThatCoarserOnesLeave) {
  const Granularity row = Granularity::row();
  const std::vector<TensorSpec> specs = {
      {"narrow", {3, 16}, row},
      {"wide", {9, 64}, row},
      {"other", {4, 48}, row},
      {"bias", {5}, row}};
  // 9 wide rows over 4 shards leave room for 3 rows: narrow and bias fit.
  const FlatLayout layout = FlatLayout::build(specs, 4);
  ASSERT_EQ(layout.segments().size(), 2u);
  EXPECT_EQ(layout.segments()[0].granule, 64);
  EXPECT_EQ(layout.segments()[0].shard_numel, 192);
  EXPECT_EQ(layout.segments()[1].granule, 48);
  EXPECT_EQ(layout.segments()[1].shard_numel, 48);
  EXPECT_EQ(offsets_of(layout), (Offsets{576, 0, 768, 624}));
  // Over 3 shards the wide rows leave no room, but the others do.
  const FlatLayout full = FlatLayout::build(specs, 3);
  ASSERT_EQ(full.segments().size(), 2u);
  EXPECT_EQ(full.segments()[0].granule, 48);
  EXPECT_EQ(full.segments()[0].shard_numel, 96);
  EXPECT_EQ(full.segments()[1].granule, 64);
  EXPECT_EQ(full.segments()[1].shard_numel, 192);
  EXPECT_EQ(offsets_of(full), (Offsets{192, 288, 0, 240}));
}

TEST(FlatLayout, RowWidthsOffTheAlignmentCutAtTheCommonMultiple) {
  const FlatLayout layout = FlatLayout::build(
      {{"a", {9, 6}, Granularity::row()}, {"b", {2, 6}, Granularity::row()}},
      2);
  EXPECT_EQ(layout.segments().front().granule, 48);
  EXPECT_EQ(offsets_of(layout), (Offsets{0, 96}));
  EXPECT_EQ(layout.shard_numel(), 96);
}

TEST(FlatLayout, BlocksMayEndShortButAreNotCut) {
  const FlatLayout layout = FlatLayout::build(
      {{"a", {5, 8}, Granularity::block(2)},
       {"b", {2, 8}, Granularity::block(2)}},
      2);
  ASSERT_EQ(layout.segments().size(), 1u);
  EXPECT_EQ(offsets_of(layout), (Offsets{0, 48}));
  EXPECT_EQ(layout.shard_numel(), 32);
}

TEST(FlatLayout, ChunksAreThoseOfTorchChunk) {
  const Granularity chunk = Granularity::chunk();
  const FlatLayout layout = FlatLayout::build(
      {{"a", {7, 3}, chunk}, {"b", {2, 16}, chunk}, {"c", {5}, chunk}},
      4);
  // ceil(7 / 4) = 2 slices of 3 elements, and the next segment is aligned.
  const auto pieces = [&](std::int64_t tensor) {
    std::vector<std::int64_t> numel;
    for (std::int64_t shard = 0; shard < 4; ++shard) {
      numel.push_back(0);
      for (const Piece& piece : layout.shard_pieces(tensor, shard)) {
        numel.back() += piece.numel;
        EXPECT_EQ(piece.local_offset % 16, 0);
      }
    }
    return numel;
  };
  EXPECT_EQ(pieces(0), (std::vector<std::int64_t>{6, 6, 6, 3}));
  EXPECT_EQ(pieces(1), (std::vector<std::int64_t>{16, 16, 0, 0}));
  EXPECT_EQ(pieces(2), (std::vector<std::int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(offsets_of(layout), (Offsets{0, 64, 128}));
  EXPECT_EQ(layout.shard_numel(), 48);
  EXPECT_EQ(layout.segments().size(), 5u);  // two bring the next to 16
}

TEST(FlatLayout, WholeTensorsGoToTheLeastLoadedShard) {
  const Granularity tensor = Granularity::tensor();
  const FlatLayout layout = FlatLayout::build(
      {{"a", {32}, tensor},
       {"b", {80}, tensor},
       {"c", {2, 20}, tensor},
       {"d", {16}, tensor}},
      2);
  // Largest first: b to 0, c to 1, a to 1, d (tied at 80) to 0.
  EXPECT_EQ(layout.shard_numel(), 96);
  EXPECT_EQ(offsets_of(layout), (Offsets{96, 0, 128, 80}));
  const FlatLayout many = FlatLayout::build({{"a", {32}, tensor}}, 5);
  EXPECT_EQ(many.numel(), 160);
  EXPECT_EQ(many.shard_pieces(0, 0), (std::vector<Piece>{{0, 0, 32}}));
}

TEST(FlatLayout, MixedGranularitiesKeepTheirOwnCuts) {
  const FlatLayout layout = FlatLayout::build(
      {{"a", {4, 16}},
       {"b", {4, 16}, Granularity::row()},
       {"c", {4, 16}, Granularity::tensor()},
       {"d", {4, 16}, Granularity::element(128)},
       {"e", {3}}},
      2);
  ASSERT_EQ(layout.segments().size(), 2u);
  EXPECT_EQ(layout.segments()[0].granule, 128);
  EXPECT_FALSE(layout.segments()[0].whole_tensors);
  EXPECT_TRUE(layout.segments()[1].whole_tensors);
  EXPECT_EQ(layout.tensor_segment(2), 1);
  EXPECT_EQ(offsets_of(layout), (Offsets{64, 128, 256, 0, 192}));
}

TEST(FlatLayout, EmptyLayouts) {
  for (const FlatLayout& layout :
       {FlatLayout::build({}, 3),
        FlatLayout::build({{"a", {0, 4}, Granularity::row()}, {"b", {0}}}, 3),
        FlatLayout::build({{"a", {0}, Granularity::tensor()}}, 3)}) {
    EXPECT_EQ(layout.numel(), 0);
    EXPECT_EQ(layout.shard_numel(), 0);
    EXPECT_EQ(layout.segments().size(), 1u);
    EXPECT_EQ(layout.padding_ratio(), 0);
    EXPECT_TRUE(layout.padding_ranges().empty());
    EXPECT_NE(layout.describe().find("shard 2: nothing"), std::string::npos);
  }
}

TEST(FlatLayout, FindsByName) {
  const FlatLayout layout = FlatLayout::build({{"a", {4}}, {"b", {4}}}, 1);
  EXPECT_EQ(layout.find("b"), 1);
  EXPECT_EQ(layout.find("c"), std::nullopt);
  EXPECT_EQ(layout.spec(1).name, "b");
  EXPECT_EQ(layout.tensor_numel(1), 4);
}

TEST(FlatLayout, AlignmentIsAnOption) {
  const FlatLayout layout =
      FlatLayout::build({{"a", {5}}, {"b", {5}}}, 2, /*alignment=*/32);
  EXPECT_EQ(layout.tensor_offset(1), 32);
  EXPECT_EQ(layout.shard_numel(), 32);
  const FlatLayout dense = FlatLayout::build(
      {{"a", {5}, Granularity::element(1)},
       {"b", {5}, Granularity::element(1)}},
      2,
      /*alignment=*/1);
  EXPECT_EQ(dense.padding_numel(), 0);
}

TEST(FlatLayout, RefusesBadInput) {
  const auto build = [](std::vector<TensorSpec> specs,
                        std::int64_t num_shards = 2,
                        std::int64_t alignment = kLayoutAlignment) {
    return [=] { FlatLayout::build(specs, num_shards, alignment); };
  };
  const auto usage = ErrorCode::usage;
  const auto config = ErrorCode::config;
  expect_error(usage, "num_shards: expected at least 1, got 0", build({}, 0));
  expect_error(
      config,
      "alignment: expected at least 1 element, got 0",
      build({}, 1, 0));
  expect_error(
      usage,
      "a tensor of a layout has an empty name",
      build({{"", {1}}}));
  expect_error(
      usage,
      "two tensors of a layout are named 'a'",
      build({{"a", {1}}, {"b", {1}}, {"a", {2}}}));
  expect_error(
      usage,
      "tensor 'a': dim 1 has size -3; expected at least 0",
      build({{"a", {2, -3}}}));
}

TEST(FlatLayout, RefusesSizesBeyond64Bits) {
  const auto build = [](std::vector<TensorSpec> specs, std::int64_t num) {
    return [=] { FlatLayout::build(specs, num); };
  };
  const auto config = ErrorCode::config;
  const std::int64_t huge = 1LL << 62;
  expect_error(
      config,
      "a: 4611686018427387904 * 4 elements do not fit 64 bits",
      build({{"a", {huge, 4}}}, 1));
  expect_error(
      config,
      "b: 4611686018427387904 + ",
      build({{"a", {huge}}, {"b", {huge}}}, 1));
  expect_error(
      config,
      "flat space: 4611686018427387904 * 2 elements do not fit",
      build({{"a", {1, huge}, Granularity::row()}}, 2));
  // A zero-size dim wins, and the width of its rows is not computed.
  EXPECT_EQ(
      FlatLayout::build({{"a", {0, huge}, Granularity::block(8)}}, 1).numel(),
      0);
  EXPECT_EQ(FlatLayout::build({{"a", {huge, 4, 0}}}, 1).numel(), 0);
}

TEST(FlatLayout, RefusesBadQueries) {
  const FlatLayout layout = FlatLayout::build({{"a", {40}}}, 2);
  for (const std::int64_t i : {-1, 1}) {
    const std::string text =
        fmt::format("tensor index {} is out of range, the layout has 1", i);
    expect_error(ErrorCode::usage, text, [&] { layout.spec(i); });
    expect_error(ErrorCode::usage, text, [&] { layout.tensor_offset(i); });
    expect_error(ErrorCode::usage, text, [&] { layout.tensor_numel(i); });
    expect_error(ErrorCode::usage, text, [&] { layout.tensor_segment(i); });
    expect_error(ErrorCode::usage, text, [&] { layout.shard_pieces(i, 0); });
  }
  for (const ShardSpan span : {ShardSpan{-1, 1}, {2, 1}, {1, 2}, {0, 0}}) {
    expect_error(
        ErrorCode::usage,
        fmt::format(
            "shards [{}, {}) are out of range, the layout has 2 shards",
            span.first,
            span.first + span.count),
        [&] { layout.shard_pieces(0, span); });
  }
}

}  // namespace
}  // namespace flatshard
