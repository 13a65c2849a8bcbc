#include "flatshard/float8/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>

// The formats against a table: a number becomes the code whose value is
// nearest in float64.
namespace flatshard::float8 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();

// Returns a code's value from the definition: (-1)^s 2^(e - bias) (1 + m /
// 2^bits).
double defined_value(int code, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int e = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int m = code & ((1 << mantissa_bits) - 1);
  const double fraction = m / std::ldexp(1.0, mantissa_bits);
  const double magnitude = e == 0 ? std::ldexp(fraction, 1 - bias)
                                  : std::ldexp(1 + fraction, e - bias);
  return code >= 128 ? -magnitude : magnitude;
}

class Formats : public ::testing::TestWithParam<Format> {
 protected:
  Format format() const { return GetParam(); }
  int mantissa_bits() const { return format() == Format::e4m3 ? 3 : 2; }
  int num_finite() const { return format() == Format::e4m3 ? 127 : 124; }
  double value(int code) const {
    return defined_value(code, 7 - mantissa_bits(), mantissa_bits());
  }
  // The codes of non-negative numbers, and the middle between each and the
  // next.
  void SetUp() override {
    for (int code = 0; code < num_finite(); ++code) {
      values_.push_back(value(code));
    }
    for (int code = 0; code + 1 < num_finite(); ++code) {
      middles_.push_back((values_[code] + values_[code + 1]) / 2);
    }
  }
  std::uint8_t nearest(float x) const {
    if (std::isnan(x)) {
      return 0x7f;
    }
    const double magnitude = std::abs(static_cast<double>(x));
    const auto found =
        std::lower_bound(middles_.begin(), middles_.end(), magnitude);
    auto code = static_cast<int>(found - middles_.begin());
    // At a middle the even code of both.
    if (found != middles_.end() && *found == magnitude && code % 2 == 1) {
      ++code;
    }
    return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
  }
  void expect_nearest(std::uint32_t bits) const {
    const float x = float_of(bits);
    const int got = encode(x, format());
    const int want = nearest(x);
    if (got != want) {
      ADD_FAILURE() << "encode(" << x << ") is " << got << ", not " << want;
    }
  }

  std::vector<double> values_;
  std::vector<double> middles_;
};

INSTANTIATE_TEST_SUITE_P(
    Both,
    Formats,
    ::testing::Values(Format::e4m3, Format::e5m2),
    [](const auto& info) {
      return std::string(info.param == Format::e4m3 ? "e4m3" : "e5m2");
    });

TEST_P(Formats, All256Codes) {
  for (int code = 0; code < 256; ++code) {
    SCOPED_TRACE(code);
    const float got = decode(static_cast<std::uint8_t>(code), format());
    if ((code & 0x7f) < num_finite()) {
      EXPECT_EQ(got, value(code));
      EXPECT_EQ(std::signbit(got), code >= 128);
      EXPECT_EQ(encode(got, format()), code);
    } else if (format() == Format::e5m2 && (code & 0x7f) == 0x7c) {
      EXPECT_EQ(got, code >= 128 ? -kInf : kInf);
      EXPECT_EQ(encode(got, format()), code - 1);
    } else {
      EXPECT_TRUE(std::isnan(got));
      EXPECT_EQ(encode(got, format()), kNan);
    }
  }
}

TEST_P(Formats, AllBfloat16Values) {
  for (std::uint32_t high = 0; high < 1U << 16; ++high) {
    expect_nearest(high << 16);
  }
}

TEST_P(Formats, BesideEveryMiddleAndValue) {
  for (const auto* numbers : {&values_, &middles_}) {
    for (const double number : *numbers) {
      const std::uint32_t bits = bits_of(static_cast<float>(number));
      for (std::int64_t off = -2; off <= 2; ++off) {
        if (static_cast<std::int64_t>(bits) + off < 0) {
          continue;
        }
        expect_nearest(static_cast<std::uint32_t>(bits + off));
        expect_nearest(static_cast<std::uint32_t>(bits + off) | 0x80000000U);
      }
    }
  }
}

// Uniform in the exponents where something is rounded, and in all bits.
TEST_P(Formats, TenMillionFloats) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 5'000'000; ++i) {
    const std::uint64_t drawn = random();
    const auto any = static_cast<std::uint32_t>(drawn);
    const auto other = static_cast<std::uint32_t>(drawn >> 32);
    expect_nearest(any);
    expect_nearest((other & 0x807fffffU) | (105 + (other >> 23) % 40) << 23);
  }
}

// build/tests/float8_formats_test --gtest_also_run_disabled_tests
//   --gtest_filter='*AllFloats*': minutes.
TEST_P(Formats, DISABLED_AllFloats) {
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; ++bits) {
    expect_nearest(static_cast<std::uint32_t>(bits));
  }
}

TEST(FormatsE4m3, F11_SaturatesAndKeepsNan) {
  const auto e4m3 = [](float x) { return encode(x, Format::e4m3); };
  EXPECT_EQ(e4m3(0.0F), 0x00);
  EXPECT_EQ(e4m3(-0.0F), 0x80);
  EXPECT_EQ(e4m3(448.0F), 0x7e);
  // torch's cast makes NaN of the second and the third.
  for (const float x : {449.0F, 464.0F, 465.0F, 1e9F, kInf}) {
    EXPECT_EQ(e4m3(x), 0x7e) << x;
    EXPECT_EQ(e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(e4m3(432.0F), 0x7e);  // a tie, to the even code
  EXPECT_EQ(e4m3(0x1p-9F), 0x01);
  EXPECT_EQ(e4m3(0x1p-10F), 0x00);  // a tie
  EXPECT_EQ(e4m3(0x1.000002p-10F), 0x01);
  EXPECT_EQ(e4m3(-0x1p-149F), 0x80);
  EXPECT_EQ(e4m3(kQuietNan), 0x7f);
  EXPECT_EQ(e4m3(-kQuietNan), 0x7f);
}

TEST(FormatsE5m2, Limits) {
  const auto e5m2 = [](float x) { return encode(x, Format::e5m2); };
  for (const float x : {57344.0F, 61440.0F, 65536.0F, kInf}) {
    EXPECT_EQ(e5m2(x), 0x7b) << x;
    EXPECT_EQ(e5m2(-x), 0xfb) << x;
  }
  EXPECT_EQ(e5m2(0x1p-16F), 0x01);
  EXPECT_EQ(e5m2(0x1p-17F), 0x00);
  EXPECT_EQ(e5m2(kQuietNan), 0x7f);
}

// ------------------------------------------------------------------- scales

TEST(E8m0, All256Codes) {
  for (int code = 0; code < 255; ++code) {
    const auto e8m0 = static_cast<std::uint8_t>(code);
    EXPECT_EQ(decode_e8m0(e8m0), std::ldexp(1.0, code - 127)) << code;
    const Scale scale = scale_of_e8m0(e8m0);
    EXPECT_EQ(scale.dequantize, decode_e8m0(e8m0)) << code;
    EXPECT_EQ(static_cast<double>(scale.quantize) * scale.dequantize, 1.0);
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
  EXPECT_TRUE(std::isnan(scale_of_e8m0(255).quantize));
}

// floor(log2(amax)) - 8 and ceil(log2(amax / 448)), in float64 over all
// mantissas that differ at the limits and all exponents.
TEST_P(Formats, ScalesThatArePowersOfTwo) {
  const double largest = values_.back();
  const int emax = std::ilogb(largest);
  for (std::uint32_t e = 0; e < 255; ++e) {
    for (const std::uint32_t mantissa :
         {0U, 1U, 0x5fffffU, 0x600000U, 0x600001U, 0x7fffffU}) {
      const float amax = float_of(e << 23 | mantissa);
      if (amax == 0.0F) {
        continue;
      }
      const int floor = std::clamp(std::ilogb(amax) - emax, -127, 127);
      int up = std::clamp(floor, -127, 127);
      while (up < 127 && std::ldexp(largest, up) < amax) {
        ++up;
      }
      EXPECT_EQ(e8m0_of(amax, format(), Rounding::floor) - 127, floor) << amax;
      EXPECT_EQ(e8m0_of(amax, format(), Rounding::up) - 127, up) << amax;
    }
  }
}

TEST_P(Formats, ScalesOfZerosInfAndNan) {
  for (const Rounding rounding : {Rounding::floor, Rounding::up}) {
    EXPECT_EQ(e8m0_of(0.0F, format(), rounding), 0);
    EXPECT_EQ(e8m0_of(0x1p-149F, format(), rounding), 0);
    EXPECT_EQ(e8m0_of(kInf, format(), rounding), 255);
    EXPECT_EQ(e8m0_of(kQuietNan, format(), rounding), 255);
  }
  for (const float amax : {0.0F, 0x1p-149F, 0x1p-126F, kLeastAmax}) {
    const Scale scale = float_scale_of(amax, format());
    EXPECT_TRUE(std::isnormal(scale.quantize)) << amax;
    EXPECT_TRUE(std::isnormal(scale.dequantize)) << amax;
  }
  for (const float amax : {kInf, kQuietNan}) {
    EXPECT_TRUE(std::isnan(float_scale_of(amax, format()).quantize));
    EXPECT_TRUE(std::isnan(float_scale_of(amax, format()).dequantize));
  }
}

TEST_P(Formats, FloatScalesReachTheLargestCode) {
  std::mt19937 random(5);
  for (int i = 0; i < 100'000; ++i) {
    const float amax = float_of((20 + random() % 220) << 23 | random() >> 9);
    const Scale scale = float_scale_of(amax, format());
    ASSERT_EQ(encode(amax * scale.quantize, format()), num_finite() - 1);
    // Two roundings of half an ulp each.
    ASSERT_NEAR(
        scale.dequantize * values_.back() / amax,
        1.0,
        2 * std::numeric_limits<float>::epsilon());
  }
}

}  // namespace
}  // namespace flatshard::float8
