#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/recipe.h"

namespace flatshard {

/// What decoded values are multiplied by in blocks with these largest
/// magnitudes: float8::float_scale_of, or float8::e8m0_of as a float, bit for
/// bit, on any device.
///
/// @param amax  float32, >= 0
at::Tensor float8_scales(const at::Tensor& amax, const float8::Quantizer& q);

}  // namespace flatshard
