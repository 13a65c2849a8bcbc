#include "flatshard/ops/parameter_check.h"

#include <ATen/autocast_mode.h>

namespace flatshard::nn {

void refuse_without_memory(
    const std::string& name,
    const std::string& module,
    const at::Tensor& parameter) {
  throw ParameterMismatch(
      fmt::format(
          "parameter {} of {} was declared and has no memory yet: call "
          "fully_shard(*model, mesh, options) before the first forward, or "
          "nn::materialize to run the model unsharded",
          name,
          module),
      parameter);
}

void check_same_dtype(
    const char* layer,
    const at::Tensor& x,
    const at::Tensor& weight) {
  if (x.scalar_type() == weight.scalar_type() ||
      at::autocast::is_autocast_enabled(x.device().type())) {
    return;
  }
  throw ParameterMismatch(
      fmt::format(
          "{}: expected x of its weight's dtype {}, got {}",
          layer,
          c10::toString(weight.scalar_type()),
          c10::toString(x.scalar_type())),
      weight);
}

}  // namespace flatshard::nn
