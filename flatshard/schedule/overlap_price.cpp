#include "flatshard/schedule/overlap_price.h"

#include <algorithm>
#include <array>

namespace flatshard {
namespace {

double time_of(const NodeTimes& times, PlanPass pass, PlanNode node) {
  const auto found = times.find({pass, node});
  return found == times.end() ? 0 : found->second;
}

double time_of(
    const NodeTimes& times,
    const PlanStep& step,
    const OverlapPlanOptions& options) {
  // A plan never delays the weight gradients of embedding and head.
  const bool with_wgrad = step.pass == PlanPass::backward &&
                          (!options.delay_wgrad || step.layer < 0);
  return time_of(times, step.pass, step.node) +
         (with_wgrad ? time_of(times, PlanPass::wgrad, step.node) : 0);
}

}  // namespace

PlanPrice price_plan(
    const std::vector<PlanStep>& plan,
    int layers,
    const OverlapPlanOptions& options,
    const NodeTimes& times) {
  PlanPrice price;
  std::vector<int> waits_for(plan.size(), -1);
  for (const PlanWait& wait : plan_waits(plan, layers, options)) {
    waits_for[wait.waiter] = wait.earlier;
  }
  std::array<double, 2> free{};
  std::array<double, 2> busy{};
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const auto stream = static_cast<std::size_t>(plan[i].stream());
    const double time = time_of(times, plan[i], options);
    PlanSpan span{.begin = free[stream]};
    if (waits_for[i] >= 0) {
      span.begin = std::max(span.begin, price.spans[waits_for[i]].end);
    }
    span.end = span.begin + time;
    free[stream] = span.end;
    busy[stream] += time;
    price.spans.push_back(span);
  }
  price.total = *std::max_element(free.begin(), free.end());
  price.compute = busy[static_cast<std::size_t>(PlanStream::compute)];
  price.exchange = busy[static_cast<std::size_t>(PlanStream::exchange)];
  return price;
}

}  // namespace flatshard
