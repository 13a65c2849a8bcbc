#include "flatshard/checkpoint/dtypes.h"

#include <array>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

struct Dtype {
  at::ScalarType type;
  std::string_view name;
};

constexpr std::array<Dtype, 12> kDtypes{
    {{at::kFloat, "F32"},
     {at::kBFloat16, "BF16"},
     {at::kHalf, "F16"},
     {at::kDouble, "F64"},
     // The dtypes of buffers and frozen weights.
     {at::kFloat8_e4m3fn, "F8_E4M3"},
     {at::kFloat8_e5m2, "F8_E5M2"},
     {at::kLong, "I64"},
     {at::kInt, "I32"},
     {at::kShort, "I16"},
     {at::kChar, "I8"},
     {at::kByte, "U8"},
     {at::kBool, "BOOL"}}};

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const Dtype& known : kDtypes) {
    if (known.type == dtype) {
      return std::string(known.name);
    }
  }
  FLATSHARD_THROW(
      usage,
      "expected a floating-point, integer or bool dtype that safetensors "
      "supports, got {}",
      c10::toString(dtype));
}

at::ScalarType scalar_type(std::string_view dtype, std::string_view what) {
  for (const Dtype& known : kDtypes) {
    if (known.name == dtype && c10::isFloatingType(known.type) &&
        c10::elementSize(known.type) > 1) {
      return known.type;
    }
  }
  FLATSHARD_THROW(
      format,
      "{}: expected dtype F32, BF16, F16 or F64, got {}{}",
      what,
      dtype,
      dtype.starts_with("F8_")
          ? "; FP8 weights are not read: export without --fp8"
          : "");
}

}  // namespace flatshard
