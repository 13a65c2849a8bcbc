#include "flatshard/train/run/run_diagnostics.h"

#include <ATen/ATen.h>

#include <cmath>

#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/diagnostics/overlap_check.h"

namespace flatshard {

RunDiagnostics::RunDiagnostics(
    const Config& config,
    std::shared_ptr<Runtime> runtime,
    int rank,
    RunOutput* output)
    : config_(config),
      runtime_(std::move(runtime)),
      rank_(rank),
      output_(output) {
  if (config_.diagnostics.overlap_check) {
    OverlapCheck::install(runtime_);
  }
  if (config_.diagnostics.nan_check) {
    NanCheck::install(runtime_);
  }
}

void RunDiagnostics::spoil_gradient(std::int64_t step) {
  if (step != config_.debug.spoil_gradient_step || spoilt_) {
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
  if (config_.diagnostics.nan_check) {
    NanCheck::check_reduced_gradients(*runtime_);
  }
  const std::int64_t freq = config_.diagnostics.norms_freq;
  if (freq > 0 &&
      (step == 1 || step == config_.training.steps || step % freq == 0)) {
    const auto norms = parameter_norms(*runtime_);
    if (output_ != nullptr) {
      output_->norms(step, norms);
    }
  }
}

void RunDiagnostics::check_weights(Optimizer& optimizer) const {
  if (config_.diagnostics.nan_check) {
    optimizer.wait();
    NanCheck::check_weights(*runtime_);
  }
}

}  // namespace flatshard
