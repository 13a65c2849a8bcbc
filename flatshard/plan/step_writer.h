#pragma once

#include "flatshard/plan/step.h"

#include <vector>

namespace flatshard::plan {

/// The operations of two consecutive steps. The second one represents all later
/// steps.
struct WrittenSteps {
  std::vector<Operation> operations;
  int second = 0;    ///< the first operation of the second step
  StepPlan summary;  ///< stream-independent figures of that step: host, memory
};

/// Writes the operations of a Job: models how the Executor uses streams and
/// slots.
WrittenSteps write_steps(
    const Job& job,
    int microbatches,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu);

}  // namespace flatshard::plan
