#pragma once

#include "flatshard/schedule/overlap_plan.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// What one step of a node takes, in any unit of time. What is not there takes
/// none. `backward` is without the weight gradients, which are `wgrad`'s.
using NodeTimes = std::map<std::pair<PlanPass, PlanNode>, double>;

/// When a step runs.
struct PlanSpan {
  double begin = 0;
  double end = 0;
};

struct PlanPrice {
  double total = 0;
  double compute = 0;           ///< that stream is busy
  double exchange = 0;          ///< likewise
  std::vector<PlanSpan> spans;  ///< by position in the plan

  /// Compute has nothing to do and waits for rows.
  double exposed() const { return total - compute; }
};

/// Runs `plan` on paper: two streams that never wait for their host, a step
/// begins when its stream is free and its waits (plan_waits) are over. Where
/// the plan has no wgrad steps, backwards take that time besides.
///
/// A lower bound: exchanges that share memory bandwidth or SMs with compute
/// take longer than alone.
PlanPrice price_plan(
    const std::vector<PlanStep>& plan,
    int layers,
    const OverlapPlanOptions& options,
    const NodeTimes& times);

}  // namespace flatshard
