#pragma once

#include <cstdint>
#include <memory>

#include "flatshard/optim/optimizer.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/train/config/diagnostics_keys.h"
#include "flatshard/train/run/run_output.h"

namespace flatshard {

/// The checks of [diagnostics] in a run, and the disturbances of [debug].
/// Unrequested ones cost nothing.
class RunDiagnostics {
 public:
  struct Options {
    config::Diagnostics checks;
    std::int64_t spoil_gradient_step = 0;  ///< 0: none
    std::int64_t last_step = 0;
  };

  /// Has the checks watch the runtime.
  /// @param rank    the first one's gradient is spoilt.
  /// @param output  on rank 0, open when norms are written; null on others.
  RunDiagnostics(
      const Options& options,
      std::shared_ptr<Runtime> runtime,
      int rank,
      RunOutput* output);

  /// Puts a NaN into the reduced gradient, if debug.spoil_gradient_step is this
  /// step; once, also when the step comes again.
  void spoil_gradient(std::int64_t step);
  /// Between the backward and the optimizer: NaNs, and every
  /// diagnostics.norms_freq steps the norms of all parameters. Collective.
  void check_gradients(std::int64_t step);
  /// Called after the optimizer's step. If it checks for NaN, it waits for it.
  void check_weights(Optimizer& optimizer) const;

 private:
  const Options options_;
  const std::shared_ptr<Runtime> runtime_;
  const int rank_;
  RunOutput* output_;
  bool spoilt_ = false;
};

}  // namespace flatshard
