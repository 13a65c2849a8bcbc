#include "flatshard/train/precision.h"

#include "flatshard/core/error.h"

namespace flatshard {

at::ScalarType parse_dtype(const std::string& name, const std::string& key) {
  if (name == "float32") {
    return at::kFloat;
  }
  if (name == "float16") {
    return at::kHalf;
  }
  FLATSHARD_CHECK(
      name == "bfloat16",
      config,
      "{}: expected float32, bfloat16 or float16, got '{}'",
      key,
      name);
  return at::kBFloat16;
}

Precision precision(const Config& config) {
  const Config::Precision& p = config.precision;
  return {
      .compute = parse_dtype(p.compute, "precision.compute"),
      .reduce = parse_dtype(p.reduce, "precision.reduce"),
      .main_params = parse_dtype(p.main_params, "precision.main_params"),
      .main_grads = parse_dtype(p.main_grads, "precision.main_grads")};
}

GradScaling grad_scaling(const Config& config) {
  const std::string& name = config.precision.scaling;
  if (name == "pre_scaled_sum") {
    return GradScaling::pre_scaled;
  }
  FLATSHARD_CHECK(
      name == "mean" || name == "per_token",
      config,
      "precision.scaling: expected mean, pre_scaled_sum or per_token, got "
      "'{}'",
      name);
  return name == "mean" ? GradScaling::mean : GradScaling::sum;
}

}  // namespace flatshard
