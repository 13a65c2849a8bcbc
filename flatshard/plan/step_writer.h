#pragma once

#include "flatshard/plan/step.h"

#include <vector>

namespace flatshard::plan {

/// The operations of two steps that follow each other, of which the second one
/// is as all later ones are.
struct WrittenSteps {
  std::vector<Operation> operations;
  int second = 0;    ///< the first operation of the second step
  StepPlan summary;  ///< of that step, what needs no streams: host, memory
};

/// Writes the operations of a Job: what the Executor does with streams and
/// slots, on paper.
WrittenSteps write_steps(
    const Job& job,
    int microbatches,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu);

}  // namespace flatshard::plan
