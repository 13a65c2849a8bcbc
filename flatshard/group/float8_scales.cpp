#include "flatshard/group/float8_scales.h"

#include <ATen/ATen.h>

#include <limits>

namespace flatshard {

at::Tensor float8_scales(const at::Tensor& amax, const float8::Quantizer& q) {
  const float8::FormatTraits format = float8::traits_of(q.format);
  at::Tensor scales;
  if (!float8::has_power_of_two_scales(q.recipe)) {
    const at::Tensor quantize = at::full({}, format.largest, amax.options())
                                    .div(amax.clamp_min(float8::kLeastAmax));
    scales = at::full({}, 1.0F, amax.options()).div(quantize);
  } else {
    // The exponent field, and one more where the mantissa is above the
    // format's largest.
    const at::Tensor bits = amax.view(at::kInt);
    const auto largest_mantissa =
        static_cast<std::int64_t>(float8::bits_of(format.largest) & 0x7fffffU);
    at::Tensor code = bits.bitwise_right_shift(23) - format.largest_exponent;
    if (q.rounding == float8::Rounding::up) {
      code = code + bits.bitwise_and(0x7fffff).gt(largest_mantissa);
    }
    code = code.clamp_min(0);
    // 2^-127 is subnormal.
    scales = at::where(
                 code.eq(0).logical_or(bits.lt(0x00800000)),
                 at::full_like(code, 0x00400000),
                 code.bitwise_left_shift(23))
                 .view(at::kFloat);
  }
  return scales.masked_fill(
      amax.isfinite().logical_not(),
      std::numeric_limits<float>::quiet_NaN());
}

}  // namespace flatshard
