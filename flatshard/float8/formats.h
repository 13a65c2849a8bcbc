#pragma once

#include <cstdint>
#include <cstring>

#include "flatshard/core/host_device.h"

/// The arithmetic of FP8 numbers and their scales on integers,
/// without torch: the CPU uses it, and CUDA kernels match it byte for
/// byte.
///
/// Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP
/// Microscaling Formats (MX) 1.0.
namespace flatshard::float8 {

/// e4m3: largest 448, least subnormal 2^-9, no Inf, NaN 0x7f and 0xff.
/// e5m2: largest 57344, least subnormal 2^-16, Inf 0x7c, NaN 0x7d to 0x7f.
enum class Format : std::uint8_t { e4m3, e5m2 };

/// How a scale that is a power of two is computed from the largest magnitude.
enum class Rounding : std::uint8_t {
  floor,  ///< OCP MX 1.0, 6.3: values above the format's largest saturate
  up,     ///< the least scale with which none saturates, arXiv:2506.08027
};

inline constexpr std::uint8_t kNan = 0x7f;      ///< in both formats
inline constexpr std::uint8_t kNanE8m0 = 0xff;  ///< scale of a block with NaN

/// Widths and limits of a format.
struct FormatTraits {
  int mantissa_bits;
  int bias;
  std::uint8_t largest_code;
  float largest;
  int largest_exponent;  ///< of `largest`
};

FLATSHARD_HOST_DEVICE constexpr FormatTraits traits_of(Format format) {
  return format == Format::e4m3 ? FormatTraits{3, 7, 0x7e, 448.0F, 8}
                                : FormatTraits{2, 15, 0x7b, 57344.0F, 15};
}

FLATSHARD_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FLATSHARD_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

inline constexpr std::uint32_t kInfBits = 0x7f800000U;

/// Rounds to nearest, ties to even. Values above the format's largest, Inf too,
/// become the largest; NaN becomes 0x7f; zeros keep their sign.
FLATSHARD_HOST_DEVICE inline std::uint8_t encode(float value, Format format) {
  const FormatTraits f = traits_of(format);
  const std::uint32_t bits = bits_of(value);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80U);
  std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > kInfBits) {
    return kNan;
  }
  const int least_exponent = 1 - f.bias;
  std::uint32_t code;
  if (static_cast<int>(magnitude >> 23) - 127 < least_exponent) {
    // float32's own addition rounds to a multiple of the least subnormal.
    const float shift = float_of(
        static_cast<std::uint32_t>(127 + 23 + least_exponent - f.mantissa_bits)
        << 23);
    code = bits_of(float_of(magnitude) + shift) - bits_of(shift);
  } else {
    const int dropped = 23 - f.mantissa_bits;
    magnitude += (1U << (dropped - 1)) - 1 + (magnitude >> dropped & 1U);
    code = (magnitude >> dropped) -
           (static_cast<std::uint32_t>(127 - f.bias) << f.mantissa_bits);
    code = code < f.largest_code ? code : f.largest_code;
  }
  return sign | static_cast<std::uint8_t>(code);
}

/// Exact.
FLATSHARD_HOST_DEVICE inline float decode(std::uint8_t code, Format format) {
  const FormatTraits f = traits_of(format);
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
  const std::uint32_t magnitude = code & 0x7fU;
  if (magnitude > f.largest_code) {
    const bool inf = format == Format::e5m2 && magnitude == 0x7c;
    return float_of(sign | (inf ? kInfBits : 0x7fc00000U));
  }
  if (magnitude >> f.mantissa_bits == 0) {
    const float least = float_of(
        static_cast<std::uint32_t>(127 + 1 - f.bias - f.mantissa_bits) << 23);
    return float_of(sign | bits_of(static_cast<float>(magnitude) * least));
  }
  return float_of(
      sign | ((magnitude << (23 - f.mantissa_bits)) +
              (static_cast<std::uint32_t>(127 - f.bias) << 23)));
}

/// 2^(code - 127); 255 is NaN.
FLATSHARD_HOST_DEVICE inline float decode_e8m0(std::uint8_t code) {
  if (code == kNanE8m0) {
    return float_of(0x7fc00000U);
  }
  // 2^-127 is subnormal.
  return float_of(
      code == 0 ? 0x00400000U : static_cast<std::uint32_t>(code) << 23);
}

/// Returns the E8M0 scale of a block whose largest magnitude is `amax`: 2^(code
/// - 127) is what decoded values are multiplied by. Clamped to 2^-127 and
/// 2^127; a block of zeros has 0, one with Inf or NaN has 255.
FLATSHARD_HOST_DEVICE inline std::uint8_t
e8m0_of(float amax, Format format, Rounding rounding) {
  const FormatTraits f = traits_of(format);
  std::uint32_t bits = bits_of(amax) & 0x7fffffffU;
  if (bits >= kInfBits) {
    return kNanE8m0;
  }
  if (bits < 0x00800000U) {  // at most 2^-126: below the clamp, or at it
    return 0;
  }
  int exponent = static_cast<int>(bits >> 23) - f.largest_exponent;
  const std::uint32_t largest_mantissa = bits_of(f.largest) & 0x7fffffU;
  if (rounding == Rounding::up && (bits & 0x7fffffU) > largest_mantissa) {
    ++exponent;
  }
  return static_cast<std::uint8_t>(exponent < 0 ? 0 : exponent);
}

/// The two factors of a block: data = encode(x * quantize), and x is about
/// decode(data) * dequantize.
struct Scale {
  float quantize;
  float dequantize;
};

/// Least amax that still counts, so that both factors are normal numbers. A
/// block of zeros has its scale.
inline constexpr float kLeastAmax = 0x1p-110F;

/// largest / amax, rounded to nearest; NaN for a block with Inf or NaN.
FLATSHARD_HOST_DEVICE inline float quantizer_of(float amax, Format format) {
  if (bits_of(amax) >= kInfBits) {
    return float_of(0x7fc00000U);
  }
  const float counted = amax < kLeastAmax ? kLeastAmax : amax;
  return traits_of(format).largest / counted;
}

/// 1 / quantize, rounded to nearest.
FLATSHARD_HOST_DEVICE inline float dequantizer_of(float quantize) {
  return quantize != quantize ? quantize : 1.0F / quantize;
}

FLATSHARD_HOST_DEVICE inline Scale float_scale_of(float amax, Format format) {
  const float quantize = quantizer_of(amax, format);
  return {quantize, dequantizer_of(quantize)};
}

/// Returns the factors of an E8M0 scale; both exact.
FLATSHARD_HOST_DEVICE inline Scale scale_of_e8m0(std::uint8_t code) {
  if (code == kNanE8m0) {
    return {decode_e8m0(code), decode_e8m0(code)};
  }
  return {
      decode_e8m0(static_cast<std::uint8_t>(254 - code)),
      decode_e8m0(code)};
}

}  // namespace flatshard::float8
