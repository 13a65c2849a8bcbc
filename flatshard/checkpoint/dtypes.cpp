#include "flatshard/checkpoint/dtypes.h"

#include <array>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

struct Dtype {
  at::ScalarType type;
  std::string_view name;
};

constexpr std::array<Dtype, 4> kDtypes{
    {{at::kFloat, "F32"},
     {at::kBFloat16, "BF16"},
     {at::kHalf, "F16"},
     {at::kDouble, "F64"}}};

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const Dtype& known : kDtypes) {
    if (known.type == dtype) {
      return std::string(known.name);
    }
  }
  FLATSHARD_THROW(
      usage,
      "expected float32, bfloat16, float16 or float64, got {}",
      c10::toString(dtype));
}

at::ScalarType scalar_type(std::string_view dtype, std::string_view what) {
  for (const Dtype& known : kDtypes) {
    if (known.name == dtype) {
      return known.type;
    }
  }
  FLATSHARD_THROW(
      format,
      "{}: expected dtype F32, BF16, F16 or F64, got {}",
      what,
      dtype);
}

}  // namespace flatshard
