#pragma once

#include <cstdint>

namespace flatshard::kernels {

/// The dtypes of flat tensors in kernels. Without torch; see float_dtype_of.
enum class FloatDtype : std::uint8_t { float32, bfloat16, float16 };

}  // namespace flatshard::kernels
