#include "flatshard/group/precision.h"

#include "flatshard/core/error.h"

#include <c10/core/ScalarType.h>

namespace flatshard {
namespace {

void check_dtype(const char* option, at::ScalarType dtype, bool wide) {
  FLATSHARD_CHECK(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
          (wide && dtype == at::kDouble),
      config,
      "expected precision.{} to be float32, bfloat16 or float16{}, "
      "got {}",
      option,
      wide ? ", or float64" : " (float64 only where main_params is)",
      c10::toString(dtype));
}

}  // namespace

void Precision::validate() const {
  const bool wide = main_params == at::kDouble;
  check_dtype("compute", compute, wide);
  check_dtype("reduce", reduce, wide);
  check_dtype("main_params", main_params, wide);
  check_dtype("main_grads", main_grads, wide);
  FLATSHARD_CHECK(
      c10::elementSize(main_params) >= c10::elementSize(compute),
      config,
      "expected precision.main_params to be at least as wide as "
      "precision.compute ({}), got {}",
      c10::toString(compute),
      c10::toString(main_params));
}

}  // namespace flatshard
