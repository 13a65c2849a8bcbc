#pragma once

#include "flatshard/float8/quantize.h"

namespace flatshard::float8 {

/// Quantizes the values of a row plane along their columns. Recipes with scales
/// that are powers of two: bfloat16 has these values exactly.
///
/// @param columns  the transposed column plane, overwritten.
/// @param rows     a row plane of the quantizer's recipe
void requantize_into(
    const Plane& columns,
    const Plane& rows,
    const Quantizer& quantizer);

}  // namespace flatshard::float8
