// The memory map, word for word, for 1, 2, 4, 5 and 8 shards.
#include <gtest/gtest.h>

#include "flatshard/layout/flat_layout.h"

namespace flatshard {
namespace {

struct Golden {
  std::int64_t num_shards;
  const char* text;
};

void expect_maps(
    const std::vector<TensorSpec>& specs,
    const std::vector<Golden>& maps) {
  for (const Golden& map : maps) {
    EXPECT_EQ(FlatLayout::build(specs, map.num_shards).describe(), map.text);
  }
}

// clang-format off
TEST(Describe, ElementGranularity) {
  const std::vector<TensorSpec> specs = {
      {"embedding", {9, 8}},
      {"norm", {8}},
      {"scale", {}},
      {"unused", {0, 8}},
      {"head", {5, 9}}};
  expect_maps(specs, {
      {1,
       R"(5 tensors, 160 elements in 1 shards of 160, padding 34 (26.98 %)
segment 0: granule 16, [0, 160), shards of 160 at local 0
  [  0,  72)  embedding [9, 8] element(16): shard 0
  [ 72,  80)  (padding 8): shard 0
  [ 80,  88)  norm [8] element(16): shard 0
  [ 88,  96)  (padding 8): shard 0
  [ 96,  97)  scale [] element(16): shard 0
  [ 97,  97)  unused [0, 8] element(16): empty
  [ 97, 112)  (padding 15): shard 0
  [112, 157)  head [5, 9] element(16): shard 0
  [157, 160)  (padding 3): shard 0
shard 0: embedding[0, 72) pad 8 norm[0, 8) pad 8 scale[0, 1) pad 15 head[0, 45) pad 3
)"},
      {2,
       R"(5 tensors, 160 elements in 2 shards of 80, padding 34 (26.98 %)
segment 0: granule 16, [0, 160), shards of 80 at local 0
  [  0,  72)  embedding [9, 8] element(16): shard 0
  [ 72,  80)  (padding 8): shard 0
  [ 80,  88)  norm [8] element(16): shard 1
  [ 88,  96)  (padding 8): shard 1
  [ 96,  97)  scale [] element(16): shard 1
  [ 97,  97)  unused [0, 8] element(16): empty
  [ 97, 112)  (padding 15): shard 1
  [112, 157)  head [5, 9] element(16): shard 1
  [157, 160)  (padding 3): shard 1
shard 0: embedding[0, 72) pad 8
shard 1: norm[0, 8) pad 8 scale[0, 1) pad 15 head[0, 45) pad 3
)"},
      {4,
       R"(5 tensors, 192 elements in 4 shards of 48, padding 66 (52.38 %)
segment 0: granule 16, [0, 192), shards of 48 at local 0
  [  0,  72)  embedding [9, 8] element(16): shards 0-1
  [ 72,  80)  (padding 8): shard 1
  [ 80,  88)  norm [8] element(16): shard 1
  [ 88,  96)  (padding 8): shard 1
  [ 96,  97)  scale [] element(16): shard 2
  [ 97,  97)  unused [0, 8] element(16): empty
  [ 97, 112)  (padding 15): shard 2
  [112, 157)  head [5, 9] element(16): shards 2-3
  [157, 192)  (padding 35): shard 3
shard 0: embedding[0, 48)
shard 1: embedding[48, 72) pad 8 norm[0, 8) pad 8
shard 2: scale[0, 1) pad 15 head[0, 32)
shard 3: head[32, 45) pad 35
)"},
      {5,
       R"(5 tensors, 160 elements in 5 shards of 32, padding 34 (26.98 %)
segment 0: granule 16, [0, 160), shards of 32 at local 0
  [  0,  72)  embedding [9, 8] element(16): shards 0-2
  [ 72,  80)  (padding 8): shard 2
  [ 80,  88)  norm [8] element(16): shard 2
  [ 88,  96)  (padding 8): shard 2
  [ 96,  97)  scale [] element(16): shard 3
  [ 97,  97)  unused [0, 8] element(16): empty
  [ 97, 112)  (padding 15): shard 3
  [112, 157)  head [5, 9] element(16): shards 3-4
  [157, 160)  (padding 3): shard 4
shard 0: embedding[0, 32)
shard 1: embedding[32, 64)
shard 2: embedding[64, 72) pad 8 norm[0, 8) pad 8
shard 3: scale[0, 1) pad 15 head[0, 16)
shard 4: head[16, 45) pad 3
)"},
      {8,
       R"(5 tensors, 256 elements in 8 shards of 32, padding 130 (103.17 %)
segment 0: granule 16, [0, 256), shards of 32 at local 0
  [  0,  72)  embedding [9, 8] element(16): shards 0-2
  [ 72,  80)  (padding 8): shard 2
  [ 80,  88)  norm [8] element(16): shard 2
  [ 88,  96)  (padding 8): shard 2
  [ 96,  97)  scale [] element(16): shard 3
  [ 97,  97)  unused [0, 8] element(16): empty
  [ 97, 112)  (padding 15): shard 3
  [112, 157)  head [5, 9] element(16): shards 3-4
  [157, 256)  (padding 99): shards 4-7
shard 0: embedding[0, 32)
shard 1: embedding[32, 64)
shard 2: embedding[64, 72) pad 8 norm[0, 8) pad 8
shard 3: scale[0, 1) pad 15 head[0, 16)
shard 4: head[16, 45) pad 3
shard 5: pad 32
shard 6: pad 32
shard 7: pad 32
)"},
  });
}

TEST(Describe, RowGranularity) {
  const Granularity row = Granularity::row();
  const std::vector<TensorSpec> specs = {
      {"q", {6, 32}, row},
      {"norm", {20}, row},
      {"o", {5, 48}, row},
      {"k", {3, 32}, row}};
  expect_maps(specs, {
      {1,
       R"(4 tensors, 560 elements in 1 shards of 560, padding 12 (2.19 %)
segment 0: granule 32, [0, 320), shards of 320 at local 0
  [  0, 192)  q [6, 32] row: shard 0
  [192, 288)  k [3, 32] row: shard 0
  [288, 308)  norm [20] row: shard 0
  [308, 320)  (padding 12): shard 0
segment 1: granule 48, [320, 560), shards of 240 at local 320
  [320, 560)  o [5, 48] row: shard 0
shard 0: q[0, 192) k[0, 96) norm[0, 20) pad 12 | o[0, 240)
)"},
      {2,
       R"(4 tensors, 608 elements in 2 shards of 304, padding 60 (10.95 %)
segment 0: granule 32, [0, 320), shards of 160 at local 0
  [  0, 192)  q [6, 32] row: shards 0-1
  [192, 288)  k [3, 32] row: shard 1
  [288, 320)  (padding 32): shard 1
segment 1: granule 48, [320, 608), shards of 144 at local 160
  [320, 560)  o [5, 48] row: shards 0-1
  [560, 580)  norm [20] row: shard 1
  [580, 608)  (padding 28): shard 1
shard 0: q[0, 160) | o[0, 144)
shard 1: q[160, 192) k[0, 96) pad 32 | o[144, 240) norm[0, 20) pad 28
)"},
      {4,
       R"(4 tensors, 768 elements in 4 shards of 192, padding 220 (40.15 %)
segment 0: granule 32, [0, 384), shards of 96 at local 0
  [  0, 192)  q [6, 32] row: shards 0-1
  [192, 288)  k [3, 32] row: shard 2
  [288, 384)  (padding 96): shard 3
segment 1: granule 48, [384, 768), shards of 96 at local 96
  [384, 624)  o [5, 48] row: shards 0-2
  [624, 644)  norm [20] row: shard 2
  [644, 768)  (padding 124): shards 2-3
shard 0: q[0, 96) | o[0, 96)
shard 1: q[96, 192) | o[96, 192)
shard 2: k[0, 96) | o[192, 240) norm[0, 20) pad 28
shard 3: pad 96 | pad 96
)"},
      {5,
       R"(4 tensors, 560 elements in 5 shards of 112, padding 12 (2.19 %)
segment 0: granule 32, [0, 320), shards of 64 at local 0
  [  0, 192)  q [6, 32] row: shards 0-2
  [192, 288)  k [3, 32] row: shards 3-4
  [288, 308)  norm [20] row: shard 4
  [308, 320)  (padding 12): shard 4
segment 1: granule 48, [320, 560), shards of 48 at local 64
  [320, 560)  o [5, 48] row: shards 0-4
shard 0: q[0, 64) | o[0, 48)
shard 1: q[64, 128) | o[48, 96)
shard 2: q[128, 192) | o[96, 144)
shard 3: k[0, 64) | o[144, 192)
shard 4: k[64, 96) norm[0, 20) pad 12 | o[192, 240)
)"},
      {8,
       R"(4 tensors, 896 elements in 8 shards of 112, padding 348 (63.50 %)
segment 0: granule 32, [0, 512), shards of 64 at local 0
  [  0, 192)  q [6, 32] row: shards 0-2
  [192, 288)  k [3, 32] row: shards 3-4
  [288, 512)  (padding 224): shards 4-7
segment 1: granule 48, [512, 896), shards of 48 at local 64
  [512, 752)  o [5, 48] row: shards 0-4
  [752, 772)  norm [20] row: shard 5
  [772, 896)  (padding 124): shards 5-7
shard 0: q[0, 64) | o[0, 48)
shard 1: q[64, 128) | o[48, 96)
shard 2: q[128, 192) | o[96, 144)
shard 3: k[0, 64) | o[144, 192)
shard 4: k[64, 96) pad 32 | o[192, 240)
shard 5: pad 64 | norm[0, 20) pad 28
shard 6: pad 64 | pad 48
shard 7: pad 64 | pad 48
)"},
  });
}

TEST(Describe, WholeTensorsAndTheFirst16Shards) {
  const Granularity tensor = Granularity::tensor();
  expect_maps({{"a", {40}, tensor}, {"b", {20}, tensor}}, {
      {17,
       R"(2 tensors, 816 elements in 17 shards of 48, padding 756 (1260.00 %)
segment 0: whole tensors, alignment 16, [0, 816), shards of 48 at local 0
  [  0,  40)  a [40] tensor: shard 0
  [ 40,  48)  (padding 8): shard 0
  [ 48,  68)  b [20] tensor: shard 1
  [ 68, 816)  (padding 748): shards 1-16
shard 0: a[0, 40) pad 8
shard 1: b[0, 20) pad 28
shard 2: pad 48
shard 3: pad 48
shard 4: pad 48
shard 5: pad 48
shard 6: pad 48
shard 7: pad 48
shard 8: pad 48
shard 9: pad 48
shard 10: pad 48
shard 11: pad 48
shard 12: pad 48
shard 13: pad 48
shard 14: pad 48
shard 15: pad 48
... 1 more shards
)"},
  });
}
// clang-format on

}  // namespace
}  // namespace flatshard
