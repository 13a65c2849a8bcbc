#include "flatshard/device/float_dtype_of.h"

#include "flatshard/core/error.h"

namespace flatshard {

std::optional<kernels::FloatDtype> find_float_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::FloatDtype::float32;
    case at::kBFloat16:
      return kernels::FloatDtype::bfloat16;
    case at::kHalf:
      return kernels::FloatDtype::float16;
    default:
      return std::nullopt;
  }
}

kernels::FloatDtype float_dtype_of(at::ScalarType dtype) {
  const std::optional<kernels::FloatDtype> found = find_float_dtype(dtype);
  FLATSHARD_CHECK(
      found,
      internal,
      "expected float32, bfloat16 or float16 in a kernel, got {}",
      c10::toString(dtype));
  return *found;
}

}  // namespace flatshard
