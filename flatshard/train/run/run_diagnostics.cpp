#include "flatshard/train/run/run_diagnostics.h"

#include <ATen/ATen.h>

#include <cmath>

#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/diagnostics/overlap_check.h"

namespace flatshard {

RunDiagnostics::RunDiagnostics(
    const Options& options,
    std::shared_ptr<Runtime> runtime,
    int rank,
    RunOutput* output)
    : options_(options),
      runtime_(std::move(runtime)),
      rank_(rank),
      output_(output) {
  if (options_.checks.overlap_check) {
    OverlapCheck::install(runtime_);
  }
  if (options_.checks.nan_check) {
    NanCheck::install(runtime_);
  }
}

void RunDiagnostics::spoil_gradient(std::int64_t step) {
  if (step != options_.spoil_gradient_step || spoilt_) {
    return;
  }
  spoilt_ = true;
  if (rank_ == 0) {
    const at::Tensor grad =
        runtime_->groups().front()->gradients().reduced().local();
    grad.narrow(0, 0, 1).fill_(std::nan(""));
  }
}

void RunDiagnostics::check_gradients(std::int64_t step) {
  if (options_.checks.nan_check) {
    NanCheck::check_reduced_gradients(*runtime_);
  }
  const std::int64_t freq = options_.checks.norms_freq;
  if (freq > 0 &&
      (step == 1 || step == options_.last_step || step % freq == 0)) {
    const auto norms = parameter_norms(*runtime_);
    if (output_ != nullptr) {
      output_->norms(step, norms);
    }
  }
}

void RunDiagnostics::check_weights(Optimizer& optimizer) const {
  if (options_.checks.nan_check) {
    optimizer.wait();
    NanCheck::check_weights(*runtime_);
  }
}

}  // namespace flatshard
