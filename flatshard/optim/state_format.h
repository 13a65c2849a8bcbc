#pragma once

#include <cmath>
#include <cstdint>

#include "flatshard/core/float_arithmetic.h"
#include "flatshard/float8/formats.h"

/// The formats of optimizer states, without torch: the CPU uses these
/// functions, and CUDA kernels match them byte for byte.
///
/// int8 has a float32 scale for each block of 256 elements, counted from the
/// parameter's start:
///
/// | state      | code          | value                                    |
/// |------------|---------------|------------------------------------------|
/// | exp_avg    | q, -127 - 127 | scale * q / (254 - abs(q))               |
/// | exp_avg_sq | q, 0 - 255    | (scale * q / 255)^2                      |
///
/// The scale of exp_avg is the largest magnitude of the block, the scale of
/// exp_avg_sq the largest square root. So the largest element is exact, and a
/// block that is decoded and encoded again has the same codes and scale. The
/// first code is 127 times the softsign 2x / (1 + abs(x)) of x = value / scale.
/// A positive exp_avg_sq has at least code 1, so no update divides by eps only.
/// A block with a NaN or Inf has a scale that is NaN or Inf.
///
/// Source of softsign and square root: FlashOptim, arXiv:2602.23349.
namespace flatshard {

enum class StateFormat : std::int32_t { float32, bfloat16, int8 };

inline constexpr std::int64_t kStateBlock = 256;
/// Parameters of fewer elements keep float32 states instead of int8 ones. The
/// elements of the full parameter count, so the mesh changes nothing.
inline constexpr std::int64_t kMinInt8Numel = 4096;

/// A run of the flat shard with states in one format. Element i has index
/// i + shift among the elements of that format.
struct StateRange {
  std::int64_t end = 0;  ///< first element after the run
  std::int64_t shift = 0;
  StateFormat format = StateFormat::float32;

  bool operator==(const StateRange&) const = default;
};

namespace state_format {

using float8::bits_of;
using float8::float_of;

using float_arithmetic::divide;
using float_arithmetic::plus;
using float_arithmetic::times;

/// Returns b where a is NaN.
FLATSHARD_HOST_DEVICE inline float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

#ifdef __CUDACC__
/// Returns 1 / b of a normal b whose reciprocal is normal, within an ulp.
__device__ inline float near_reciprocal(float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return r;
}

/// Returns a / b, computed from 1 / b and one correction.
__device__ inline float near_quotient(float a, float b, float reciprocal) {
  const float q = __fmul_rn(a, reciprocal);
  return __fmaf_rn(__fmaf_rn(-b, q, a), reciprocal, q);
}
#endif

/// Returns a / b rounded to nearest, for b in [1, 256) and |a| <= 2 b. Neither
/// underflow nor overflow matters there, so a reciprocal and its corrections
/// are enough. Source: Markstein, "Computation of elementary functions on the
/// IBM RISC System/6000 processor", 1990.
FLATSHARD_HOST_DEVICE inline float divide_near(float a, float b) {
#ifdef __CUDA_ARCH__
  const float r = near_reciprocal(b);
  return near_quotient(a, b, __fmaf_rn(r, __fmaf_rn(-b, r, 1.0F), r));
#else
  return a / b;
#endif
}

/// Returns a / b rounded to nearest, for integers of at most 8 bits. The
/// quotient is at least 2^-33 times itself away from the middle of two floats,
/// and one correction leaves an error of 2^-45.
FLATSHARD_HOST_DEVICE inline float divide_integers(float a, float b) {
#ifdef __CUDA_ARCH__
  return near_quotient(a, b, near_reciprocal(b));
#else
  return a / b;
#endif
}

/// Added to a small number, it leaves that number, rounded to an integer, in
/// the low bits.
inline constexpr float kToInteger = 12582912.0F;  // 1.5 * 2^23

/// Returns bits whose low byte is `value`, rounded to nearest even.
/// @param value  in -128 to 255; of NaN any byte.
FLATSHARD_HOST_DEVICE inline std::uint32_t byte_of(float value) {
  return bits_of(plus(value, kToInteger));
}

FLATSHARD_HOST_DEVICE inline std::uint32_t magnitude(float value) {
  return bits_of(value) & 0x7fffffffU;
}

inline constexpr float kLeastScale = 0x1p-126F;

/// Returns the scale of exp_avg for the bits of the largest magnitude. One that
/// has no reciprocal becomes 0.
FLATSHARD_HOST_DEVICE inline float scale_of(std::uint32_t largest) {
  const float scale = float_of(largest);
  return scale < kLeastScale ? 0.0F : scale;
}

/// Returns `of` / scale, or 0 where the block has no finite positive scale.
FLATSHARD_HOST_DEVICE inline float inverse_of(float of, float scale) {
  return scale >= kLeastScale ? divide(of, scale) : 0.0F;
}

/// Returns a code in the low byte.
/// @param inverse  inverse_of(1, scale).
FLATSHARD_HOST_DEVICE inline std::uint32_t encode_exp_avg(
    float value,
    float inverse) {
  const float x = times(value, inverse);
  const float z = divide_near(plus(x, x), plus(1.0F, std::fabs(x)));
  return byte_of(times(z, 127.0F));
}

/// @param code  -127 to 127, as a float.
FLATSHARD_HOST_DEVICE inline float decode_exp_avg(float code, float scale) {
  const float divisor = plus(254.0F, -std::fabs(code));
  return times(scale, divide_integers(code, divisor));
}

/// Returns a code in the low byte.
/// @param root     the square root of exp_avg_sq.
/// @param inverse  inverse_of(255, scale).
FLATSHARD_HOST_DEVICE inline std::uint32_t encode_exp_avg_sq(
    float root,
    float inverse) {
  const float code = times(root, inverse);  // 255 or rounded to it at most
  return byte_of(larger(code, root > 0.0F ? 1.0F : 0.0F));
}

inline constexpr float kOf255 = 1.0F / 255.0F;
static_assert(255.0F * kOf255 == 1.0F);

/// @param code  0 to 255, as a float.
FLATSHARD_HOST_DEVICE inline float decode_exp_avg_sq(float code, float scale) {
  const float root = times(scale, times(code, kOf255));
  return times(root, root);
}

}  // namespace state_format
}  // namespace flatshard
