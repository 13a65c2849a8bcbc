#include "flatshard/plan/step.h"

#include "flatshard/plan/step_writer.h"

#include <algorithm>
#include <utility>

namespace flatshard::plan {
namespace {

/// Returns how many microbatches are simulated; more are extrapolated. The last
/// two of them start while as many others are in flight.
int most_simulated(const OverlapPlanOptions& overlap) {
  return std::max(4, overlap.in_flight + 2);
}

/// Length of the union of spans.
double covered(std::vector<Span> spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  double sum = 0;
  double end = 0;
  for (const Span& span : spans) {
    const double from = std::max(end, span.begin);
    sum += std::max(0.0, span.end - from);
    end = std::max(end, span.end);
  }
  return sum;
}

StepPlan simulate(
    const Job& job,
    int microbatches,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu) {
  WrittenSteps steps = write_steps(job, microbatches, units, gpu);
  StepPlan step = std::move(steps.summary);
  const int first = steps.second;
  const std::vector<Operation>& all = steps.operations;
  const std::vector<Span> spans = run_streams(all, gpu.contention);
  // A step ends with the last operation on compute: the optimizer, or what
  // comes before it where updates overlap with the next step.
  double begin = 0;
  double end = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].stream == Stream::compute) {
      double& of_step = static_cast<int>(i) < first ? begin : end;
      of_step = std::max(of_step, spans[i].end);
    }
  }
  std::vector<Span> busy;
  std::vector<Span> busy_or_tensor;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Span span{spans[i].begin - begin, spans[i].end - begin};
    const bool computes =
        all[i].stream == Stream::compute || all[i].stream == Stream::optimizer;
    if (!computes && static_cast<int>(i) >= first) {
      step.transfers[all[i].what] += all[i].seconds;
    }
    if (span.end <= 0 || span.begin >= end - begin || all[i].seconds == 0) {
      continue;
    }
    if (computes) {
      busy.push_back({std::max(0.0, span.begin), span.end});
    } else if (all[i].stream == Stream::tensor) {
      busy_or_tensor.push_back({std::max(0.0, span.begin), span.end});
    }
    step.operations.push_back(all[i]);
    step.operations.back().waits.clear();
    step.spans.push_back(span);
  }
  step.device_seconds = end - begin;
  step.compute_seconds = covered(busy);
  step.exposed_seconds = step.device_seconds - step.compute_seconds;
  if (!busy_or_tensor.empty()) {
    busy_or_tensor.insert(busy_or_tensor.end(), busy.begin(), busy.end());
    step.exposed_tensor_seconds =
        covered(std::move(busy_or_tensor)) - step.compute_seconds;
  }
  step.seconds = std::max(step.device_seconds, step.host_seconds);
  step.shown_microbatches = microbatches;
  step.shown_seconds = step.seconds;
  step.shown_host_seconds = step.host_seconds;
  return step;
}

void extend(
    std::map<std::string, double>& values,
    const std::map<std::string, double>& before,
    double more) {
  for (auto& [key, value] : values) {
    const auto found = before.find(key);
    value += more * (value - (found == before.end() ? 0 : found->second));
  }
}

}  // namespace

StepPlan
plan_step(const Job& job, const std::vector<UnitPlan>& units, const Gpu& gpu) {
  const int most = most_simulated(job.overlap);
  if (job.microbatches <= most) {
    return simulate(job, job.microbatches, units, gpu);
  }
  // Every further microbatch adds the same time.
  const StepPlan before = simulate(job, most - 1, units, gpu);
  StepPlan step = simulate(job, most, units, gpu);
  const double more = job.microbatches - most;
  const auto extend_value = [&](double StepPlan::*member) {
    step.*member += more * (step.*member - before.*member);
  };
  extend_value(&StepPlan::device_seconds);
  extend_value(&StepPlan::host_seconds);
  extend_value(&StepPlan::compute_seconds);
  extend_value(&StepPlan::exposed_seconds);
  extend_value(&StepPlan::exposed_tensor_seconds);
  extend(step.kinds, before.kinds, more);
  extend(step.transfers, before.transfers, more);
  step.seconds = std::max(step.device_seconds, step.host_seconds);
  return step;
}

}  // namespace flatshard::plan
