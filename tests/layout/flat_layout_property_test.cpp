// Random layouts of every granularity: nothing overlaps, nothing is lost, no
// boundary splits a granule, padding stays within its bound.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "flatshard/core/error.h"
#include "flatshard/layout/flat_layout.h"

namespace flatshard {
namespace {

constexpr int kTrials = 1500;

class RandomSpecs {
 public:
  explicit RandomSpecs(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }

  Granularity granularity() {
    switch (below(5)) {
      case 0:
        return Granularity::element(1 + below(48));
      case 1:
        return Granularity::row();
      case 2:
        return Granularity::block(1 + below(5));
      case 3:
        return Granularity::chunk();
      default:
        return Granularity::tensor();
    }
  }

  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> shape(below(5));
    for (std::int64_t& size : shape) {
      const std::int64_t kind = below(20);
      size = kind == 0   ? 0
             : kind < 3  ? 1
             : kind < 10 ? 1 + below(9)
             : kind < 19 ? 8 * (1 + below(20))
                         : 1000 + below(100000);
    }
    return shape;
  }

  /// Mixed granularities, or one for all when `uniform` is given.
  std::vector<TensorSpec> specs(std::optional<Granularity> uniform) {
    std::vector<TensorSpec> specs(below(12));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      specs[i] = {
          fmt::format("t{}", i),
          shape(),
          uniform.value_or(granularity())};
    }
    return specs;
  }

 private:
  std::mt19937_64 random_;
};

void check_tensors(const FlatLayout& layout, std::int64_t alignment) {
  std::vector<FlatRange> used = layout.padding_ranges();
  std::int64_t data = 0;
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const std::int64_t numel = layout.tensor_numel(i);
    data += numel;
    if (numel > 0) {
      const Segment& segment = layout.segments()[layout.tensor_segment(i)];
      ASSERT_EQ(
          segment.whole_tensors,
          layout.spec(i).granularity == Granularity::tensor());
      ASSERT_EQ(layout.tensor_offset(i) % alignment, 0);
      ASSERT_GE(layout.tensor_offset(i), segment.offset);
      ASSERT_LE(
          layout.tensor_offset(i) + numel,
          segment.offset + segment.numel);
      used.push_back({layout.tensor_offset(i), numel});
    }
    ASSERT_GE(layout.tensor_offset(i), 0);
    ASSERT_LE(layout.tensor_offset(i) + numel, layout.numel());
  }
  // Tensors and padding together tile the flat space: no overlap, no gap.
  std::sort(used.begin(), used.end(), [](auto& a, auto& b) {
    return a.offset < b.offset;
  });
  std::int64_t end = 0;
  for (const FlatRange& range : used) {
    ASSERT_EQ(range.offset, end);
    ASSERT_GT(range.numel, 0);
    end += range.numel;
  }
  ASSERT_EQ(end, layout.numel());
  ASSERT_EQ(layout.padding_numel(), layout.numel() - data);
}

void check_segments(const FlatLayout& layout, std::int64_t alignment) {
  std::int64_t offset = 0;
  std::int64_t local_offset = 0;
  // Shards of chunks are followed by a segment that aligns the next.
  std::int64_t shard_numel = 0;
  for (const Segment& segment : layout.segments()) {
    ASSERT_EQ(segment.offset, offset);
    ASSERT_EQ(segment.local_offset, local_offset);
    ASSERT_EQ(segment.numel, segment.shard_numel * layout.num_shards());
    ASSERT_TRUE(shard_numel % alignment == 0 || segment.granule == 1);
    shard_numel += segment.shard_numel;
    offset += segment.numel;
    local_offset += segment.shard_numel;
  }
  ASSERT_EQ(shard_numel % alignment, 0);
  ASSERT_EQ(offset, layout.numel());
  ASSERT_EQ(local_offset, layout.shard_numel());
}

/// Each tensor's pieces over all shards are its elements in order. They are
/// split only between granules and have the places of the shard's flat range.
void check_pieces(const FlatLayout& layout, std::int64_t count) {
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const TensorSpec& spec = layout.spec(i);
    const Segment& segment = layout.segments()[layout.tensor_segment(i)];
    const std::int64_t granule = spec.granularity.granule_numel(spec.shape);
    std::int64_t next = 0;
    for (std::int64_t first = 0; first < layout.num_shards(); first += count) {
      for (const Piece& piece :
           layout.shard_pieces(i, ShardSpan{first, count})) {
        ASSERT_EQ(piece.tensor_offset, next);
        ASSERT_GT(piece.numel, 0);
        ASSERT_EQ(piece.tensor_offset % granule, 0) << "cut inside a granule";
        next += piece.numel;
        const std::int64_t flat = piece.local_offset -
                                  count * segment.local_offset +
                                  segment.offset + first * segment.shard_numel;
        ASSERT_EQ(flat, layout.tensor_offset(i) + piece.tensor_offset);
        ASSERT_GE(piece.local_offset, count * segment.local_offset);
        ASSERT_LE(
            piece.local_offset + piece.numel,
            count * (segment.local_offset + segment.shard_numel));
      }
    }
    ASSERT_EQ(next, layout.tensor_numel(i));
  }
}

void check_padding_bound(const FlatLayout& layout, std::int64_t alignment) {
  std::int64_t bound = 0;
  for (const Segment& segment : layout.segments()) {
    if (segment.whole_tensors) {
      return;  // one large tensor among small ones may leave most ranks empty
    }
    bound += std::max(segment.granule, alignment) * layout.num_shards();
  }
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const TensorSpec& spec = layout.spec(i);
    const std::int64_t granule = spec.granularity.granule_numel(spec.shape);
    bound += std::lcm(granule, alignment) - 1;  // before the tensor
  }
  ASSERT_LE(layout.padding_numel(), bound);
}

void check_layout(const FlatLayout& layout, std::int64_t alignment) {
  ASSERT_EQ(layout.numel(), layout.num_shards() * layout.shard_numel());
  check_tensors(layout, alignment);
  check_segments(layout, alignment);
  for (const std::int64_t count : {1, 2, 3}) {
    if (layout.num_shards() % count == 0) {
      check_pieces(layout, count);
    }
  }
  check_padding_bound(layout, alignment);
  ASSERT_FALSE(layout.describe().empty());
}

void check_random_layouts(
    std::uint64_t seed,
    std::optional<Granularity> uniform) {
  RandomSpecs random(seed);
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::vector<TensorSpec> specs = random.specs(uniform);
    const std::int64_t num_shards =
        1 + random.below(trial % 10 == 0 ? 300 : 12);
    const std::int64_t alignment = 1 << random.below(6);
    const FlatLayout layout = FlatLayout::build(specs, num_shards, alignment);
    check_layout(layout, alignment);
    if (::testing::Test::HasFatalFailure()) {
      FAIL() << "trial " << trial << "\n" << layout.describe();
    }
  }
}

TEST(FlatLayoutProperty, Element) {
  check_random_layouts(1, Granularity::element());
}

TEST(FlatLayoutProperty, R15_RowsAreNeverCut) {
  check_random_layouts(2, Granularity::row());
}

TEST(FlatLayoutProperty, Block) {
  check_random_layouts(3, Granularity::block(3));
}

TEST(FlatLayoutProperty, Tensor) {
  check_random_layouts(4, Granularity::tensor());
}

TEST(FlatLayoutProperty, B4_MixedGranularitiesNeverOverlap) {
  check_random_layouts(5, std::nullopt);
}

TEST(FlatLayoutProperty, RowPaddingKeepsTheFormula) {
  RandomSpecs random(6);
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<TensorSpec> specs;
    std::set<std::int64_t> widths;
    for (std::int64_t i = 1 + random.below(10); i > 0; --i) {
      const std::int64_t width = 16 * (1 + random.below(24));
      widths.insert(width);
      specs.push_back(
          {fmt::format("t{}", i),
           {1 + random.below(300), width},
           Granularity::row()});
    }
    const std::int64_t num_shards = 1 + random.below(64);
    const FlatLayout layout = FlatLayout::build(specs, num_shards);
    check_layout(layout, 16);
    ASSERT_LE(layout.segments().size(), widths.size());
    // Each segment pads less than one row per shard.
    ASSERT_LT(
        layout.padding_numel(),
        num_shards * std::accumulate(widths.begin(), widths.end(), 0LL));
  }
}

TEST(FlatLayoutProperty, Huge) {
  // 400 layers of a model with 10^13 parameters: integers only, no memory.
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 400; ++i) {
    specs.push_back(
        {fmt::format("w{}", i), {160000, 160001}, Granularity::element(16)});
  }
  const FlatLayout layout = FlatLayout::build(specs, 1 << 17);
  EXPECT_GT(layout.numel(), 10'000'000'000'000);
  EXPECT_LT(layout.padding_ratio(), 1e-3);
  check_tensors(layout, 16);
  check_segments(layout, 16);
}

}  // namespace
}  // namespace flatshard
