#pragma once

#include <optional>

#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/data/batches.h"
#include "flatshard/train/data/data_options.h"
#include "flatshard/train/run/advice.h"
#include "flatshard/train/run/evaluation.h"
#include "flatshard/train/run/profile_report.h"
#include "flatshard/train/run/run_checkpoints.h"
#include "flatshard/train/run/run_diagnostics.h"
#include "flatshard/train/run/run_output.h"
#include "flatshard/train/run/run_start.h"
#include "flatshard/train/run/weight_sender.h"
#include "flatshard/train/setup/memory_check.h"

namespace flatshard {

/// The options of each object that serves a run.
struct RunOptions {
  LeastMemoryOptions least_memory;
  DataOptions data;
  Batches::Options batches;
  Evaluation::Options evaluation;
  double balance_rate = 0;  ///< for ExpertLoads
  config::OnNonfinite on_nonfinite = config::OnNonfinite::stop;
  RunDiagnostics::Options diagnostics;
  ProfileReport::Options profile;
  RunCheckpoints::Options checkpoints;
  std::optional<WeightSender::Options> weights;  ///< unset: not sent
  RunOutput::Options output;
  StartOptions start;
  AdviceOptions advice;
};

/// Maps the keys of a resolved config to these options: this function defines
/// which object uses a key. The Trainer itself reads the keys of its loop, and
/// `setup` reads the keys that define the model.
RunOptions run_options(const Config& config, const models::ModelConfig& model);

}  // namespace flatshard
