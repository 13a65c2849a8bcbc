#pragma once

#include "flatshard/plan/job.h"
#include "flatshard/plan/streams.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard::plan {

/// One training step of a Job on a Gpu: the Scheduler's actions and the nodes
/// of the model on streams, with start and end times.
struct StepPlan {
  double seconds = 0;          ///< maximum of device and host
  double device_seconds = 0;   ///< of the streams
  double host_seconds = 0;     ///< to launch the step
  double compute_seconds = 0;  ///< compute or the optimizer is busy
  double exposed_seconds = 0;  ///< waits for transfers
  /// The part of `exposed_seconds` for transfers of tensor parallelism.
  double exposed_tensor_seconds = 0;
  /// Seconds of compute by kind of kernel, without contention.
  std::map<std::string, double> kinds;
  /// Seconds of transfers by kind, without contention.
  std::map<std::string, double> transfers;

  std::int64_t slot_nbytes = 0;  ///< arena size that the step needs
  /// Peak bytes on a rank over the step: activations, gradients and temporaries
  /// of a backward.
  std::int64_t peak_nbytes = 0;
  std::int64_t activation_nbytes = 0;  ///< of these, peak activations

  /// The operations of the step, with times relative to its start. One that
  /// started in the step before, such as a prefetch, has a negative start.
  std::vector<Operation> operations;
  std::vector<Span> spans;  ///< by operation
  /// Microbatches that `operations` shows; the others repeat them.
  int shown_microbatches = 0;
  double shown_seconds = 0;       ///< `seconds` of a step with only these
  double shown_host_seconds = 0;  ///< `host_seconds` of such a step
};

/// Prices a step in the steady state: the second of two that follow each other.
/// Steps of many microbatches are extrapolated from a few.
/// @param units  plan_units(job).
StepPlan
plan_step(const Job& job, const std::vector<UnitPlan>& units, const Gpu& gpu);

}  // namespace flatshard::plan
