// int8 states against a plain reference, and what a format must keep.
#include "flatshard/optim/state_format.h"
#include "flatshard/optim/state_codes.h"
#include "flatshard/optim/stochastic_rounding.h"

#include "flatshard/core/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace flatshard {
namespace {

using Values = std::vector<float>;

struct Block {
  std::vector<int> codes;
  float scale = 0;
  bool operator==(const Block&) const = default;
};

Block encode(const Values& values, bool is_signed) {
  std::vector<std::uint8_t> bytes(kStateBlock);
  Block block;
  block.scale = encode_state_block(values.data(), bytes.data(), is_signed, 0);
  for (const std::uint8_t byte : bytes) {
    block.codes.push_back(is_signed ? static_cast<std::int8_t>(byte) : byte);
  }
  return block;
}

Values decode(const Block& block, bool is_signed) {
  std::vector<std::uint8_t> bytes;
  for (const int code : block.codes) {
    bytes.push_back(static_cast<std::uint8_t>(code));
  }
  Values values(kStateBlock);
  decode_state_block(bytes.data(), is_signed, 0, block.scale, values.data());
  return values;
}

// The table of state_format.h, in double precision.
Block reference(const Values& values, bool is_signed) {
  Block block;
  for (const float v : values) {
    block.scale = std::max(block.scale, is_signed ? std::abs(v) : std::sqrt(v));
  }
  for (const float v : values) {
    if (block.scale == 0) {
      block.codes.push_back(0);
    } else if (is_signed) {
      const double x = double{v} / block.scale;
      block.codes.push_back(
          static_cast<int>(std::nearbyint(127 * 2 * x / (1 + std::abs(x)))));
    } else {
      const double root = std::sqrt(double{v}) / block.scale;
      const int code = static_cast<int>(std::nearbyint(255 * root));
      block.codes.push_back(v > 0 ? std::max(code, 1) : 0);
    }
  }
  return block;
}

double decoded(int code, float scale, bool is_signed) {
  const double root = double{scale} * code / 255;
  return is_signed ? double{scale} * code / (254 - std::abs(code))
                   : root * root;
}

// Values of magnitudes that differ by many orders.
Values values_of(int seed, float largest, bool is_signed) {
  const Philox draw(seed);
  Values values;
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    const auto words = draw(i);
    const float size = std::exp2(-24 * uniform_float(words[0]));
    const float sign = is_signed && words[1] % 2 == 1 ? -1.0F : 1.0F;
    const float value = words[2] % 16 == 0 ? 0.0F : sign * size;
    values.push_back(largest * (is_signed ? value : value * value));
  }
  return values;
}

class StateFormats : public ::testing::TestWithParam<bool> {};

TEST_P(StateFormats, EqualTheReference) {
  const bool is_signed = GetParam();
  int others = 0;
  for (int seed = 0; seed < 50; ++seed) {
    const float largest = std::exp2(static_cast<float>(seed) - 25.0F);
    const Values values = values_of(seed, largest, is_signed);
    const Block block = encode(values, is_signed);
    const Block want = reference(values, is_signed);
    EXPECT_EQ(block.scale, want.scale);
    const Values back = decode(block, is_signed);
    for (std::size_t i = 0; i < values.size(); ++i) {
      // A value between two codes may round either way in float32.
      EXPECT_LE(std::abs(block.codes[i] - want.codes[i]), 1);
      others += block.codes[i] != want.codes[i] ? 1 : 0;
      const double v = decoded(block.codes[i], block.scale, is_signed);
      EXPECT_NEAR(back[i], v, 1e-6 * std::abs(v));
    }
  }
  EXPECT_LE(others, 2);
}

// A checkpoint that is saved and loaded is the same, whatever it went through.
TEST_P(StateFormats, ADecodedBlockIsEncodedToItself) {
  const bool is_signed = GetParam();
  for (int seed = 0; seed < 200; ++seed) {
    const float largest = std::exp2(0.37F * static_cast<float>(seed) - 40.0F);
    const Block block = encode(values_of(seed, largest, is_signed), is_signed);
    EXPECT_EQ(encode(decode(block, is_signed), is_signed), block) << seed;
  }
  // Every code, with the largest one for the scale.
  for (int first = is_signed ? -127 : 0; first <= 127; first += 127) {
    Block block{.codes = std::vector<int>(kStateBlock), .scale = 0.123F};
    for (int i = 0; i < kStateBlock; ++i) {
      const int largest = is_signed ? 127 : 255;
      block.codes[i] = std::min(first + i, largest);
    }
    EXPECT_EQ(encode(decode(block, is_signed), is_signed), block);
  }
}

TEST_P(StateFormats, ZerosStayZeroAndNoPositiveValueBecomesZero) {
  const bool is_signed = GetParam();
  Values values(kStateBlock);
  EXPECT_EQ(encode(values, is_signed), (Block{std::vector<int>(256), 0}));
  EXPECT_EQ(decode(encode(values, is_signed), is_signed), values);
  values[3] = 1.0F;
  values[4] = 1e-30F;
  const Block block = encode(values, is_signed);
  EXPECT_EQ(block.codes[3], is_signed ? 127 : 255);
  EXPECT_EQ(block.codes[4], is_signed ? 0 : 1);
  EXPECT_EQ(block.codes[5], 0);
  EXPECT_EQ(decode(block, is_signed)[3], 1.0F);
}

TEST_P(StateFormats, ABlockWithANumberThatIsNotFiniteIsNotFinite) {
  const bool is_signed = GetParam();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(),
        std::numeric_limits<float>::infinity()}) {
    Values values(kStateBlock, 1.0F);
    values[100] = bad;
    const Block block = encode(values, is_signed);
    EXPECT_FALSE(std::isfinite(block.scale));
    for (const float v : decode(block, is_signed)) {
      EXPECT_FALSE(std::isfinite(v));
    }
  }
}

// Magnitudes near the least float have no reciprocal.
TEST_P(StateFormats, TheLeastMagnitudesAreFinite) {
  const bool is_signed = GetParam();
  for (const float tiny : {1e-45F, 1e-39F, 0x1p-126F}) {
    Values values(kStateBlock, tiny);
    for (const float v : decode(encode(values, is_signed), is_signed)) {
      EXPECT_TRUE(std::isfinite(v));
      EXPECT_LE(v, 1.01F * tiny);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Moments,
    StateFormats,
    ::testing::Bool(),
    [](const auto& info) { return info.param ? "ExpAvg" : "ExpAvgSq"; });

TEST(StochasticRounding, HasTheValueAsItsMean) {
  using stochastic_rounding::round;
  for (const float value : {1.001F, -3.14159F, 0x1.0001p0F, 1e-39F, 0.0F}) {
    double sum = 0;
    for (std::uint32_t random = 0; random < 65536; ++random) {
      sum += double{float8::float_of(
          static_cast<std::uint32_t>(round(value, random)) << 16)};
    }
    EXPECT_EQ(sum / 65536, double{value});
  }
  for (const float value :
       {std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(round(value, 65535), float8::bits_of(value) >> 16);
  }
  const std::uint32_t nan =
      round(std::numeric_limits<float>::quiet_NaN(), 65535);
  EXPECT_TRUE(std::isnan(float8::float_of(nan << 16)));
}

TEST(StochasticRounding, EachElementHasItsOwnBits) {
  std::vector<std::pair<std::uint64_t, int>> places;
  for (std::int64_t i = 0; i < 1024; ++i) {
    places.emplace_back(
        stochastic_rounding::block_of(i),
        stochastic_rounding::half_of(i));
    EXPECT_LT(places.back().second, 8);
  }
  EXPECT_EQ(
      stochastic_rounding::block_of(5),
      stochastic_rounding::block_of(133));
  std::ranges::sort(places);
  EXPECT_EQ(std::ranges::adjacent_find(places), places.end());
}

}  // namespace
}  // namespace flatshard
