#include "flatshard/nn/region.h"

#include <utility>

namespace flatshard::nn {

TensorList run_region(
    Module& owner,
    RegionFn fn,
    const TensorList& inputs,
    const RegionOptions& options) {
  if (options.recompute) {
    return checkpoint(owner, std::move(fn), inputs, *options.recompute);
  }
  return fn(inputs);
}

TensorList region(
    Module& owner,
    const char* name,
    RegionFn fn,
    const TensorList& inputs,
    const RegionOptions& options) {
  if (const auto runner = owner.context()->region_runner.lock()) {
    return runner->run(owner, name, std::move(fn), inputs, options);
  }
  return run_region(owner, std::move(fn), inputs, options);
}

}  // namespace flatshard::nn
