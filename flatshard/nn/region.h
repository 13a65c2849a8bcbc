#pragma once

#include "flatshard/nn/module.h"
#include "flatshard/nn/recompute.h"

#include <functional>
#include <memory>
#include <optional>

namespace flatshard::nn {

using RegionFn = std::function<TensorList(const TensorList&)>;

struct RegionOptions {
  /// The other inputs of `fn` apart from the parameters below its module, e.g.
  /// a table of rotary embeddings. A runner keeps them alive.
  TensorList constants;
  /// Set: the region keeps only its inputs and runs again in the backward, as
  /// `checkpoint` does.
  std::optional<RecomputeOptions> recompute;
};

/// Runs regions in another way than one kernel after the other.
class RegionRunner {
 public:
  virtual ~RegionRunner() = default;
  /// Returns the same values, and the same gradients in the same places, as
  /// `run_region`.
  virtual TensorList run(
      Module& owner,
      const char* name,
      RegionFn fn,
      const TensorList& inputs,
      const RegionOptions& options) = 0;
};

/// fn(inputs): a part of a forward that does the same work each time, and so
/// may be recorded once and replayed (CUDA graphs). `owner` hands it to its
/// RegionRunner; without one it costs a branch.
///
/// Only the shapes determine fn's kernels: no value of a tensor decides on the
/// host what runs. It reads inputs, constants and parameters, writes none of
/// them in place, and is the same function in every call: it captures nothing
/// except `owner` and objects that exist as long.
///
/// @param owner   not kept: it must outlive calls and backwards of calls. fn
///   may use its parameters and generators.
/// @param name    within the unit, e.g. "attn"; a literal.
/// @param inputs  defined tensors.
/// @return        the outputs of fn, differentiable.
TensorList region(
    Module& owner,
    const char* name,
    RegionFn fn,
    const TensorList& inputs,
    const RegionOptions& options = {});

/// Does the work of `region` without a runner.
TensorList run_region(
    Module& owner,
    RegionFn fn,
    const TensorList& inputs,
    const RegionOptions& options);

}  // namespace flatshard::nn
