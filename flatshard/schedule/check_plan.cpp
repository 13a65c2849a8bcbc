#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/layer_graph.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <vector>

namespace flatshard {
namespace {

using PlanPositions = std::map<PlanStep, int>;

PlanPositions plan_positions(const std::vector<PlanStep>& plan) {
  PlanPositions at;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const bool is_new = at.emplace(plan[i], i).second;
    FLATSHARD_CHECK(
        is_new,
        internal,
        "an overlap plan has {} twice",
        to_string(plan[i]));
  }
  return at;
}

int position(const PlanPositions& at, const PlanStep& step) {
  const auto found = at.find(step);
  FLATSHARD_CHECK(
      found != at.end(),
      internal,
      "an overlap plan lacks {}",
      to_string(step));
  return found->second;
}

void check_before(
    const PlanPositions& at,
    const PlanStep& earlier,
    const PlanStep& later) {
  FLATSHARD_CHECK(
      position(at, earlier) < position(at, later),
      internal,
      "an overlap plan runs {} before its dependency {}",
      to_string(later),
      to_string(earlier));
}

// In each unit the first microbatch starts before the second one and ends
// before it. Both end before the next unit starts.
void check_pair(
    const PlanPositions& at,
    int layers,
    int first,
    const OverlapPlanOptions& options) {
  const auto step = [](int microbatch, int layer, PlanNode node) {
    return PlanStep{PlanPass::forward, microbatch, layer, node};
  };
  const auto check_both = [&](int layer, PlanNode node) {
    check_before(at, step(first, layer, node), step(first + 1, layer, node));
  };
  check_both(-1, PlanNode::embed);
  PlanStep ended = step(first + 1, -1, PlanNode::embed);
  for (int l = 0; l < layers; ++l) {
    const PlanNode last = layer_graph(options, l).last_with_weights();
    check_before(at, ended, step(first, l, PlanNode::attend));
    check_both(l, PlanNode::attend);
    check_both(l, last);
    ended = step(first + 1, l, last);
  }
  check_before(at, ended, step(first, -1, PlanNode::head));
  check_both(-1, PlanNode::head);
}

// Rows are counted in attend. An exchange finishes its plans in this order, in
// their dispatch.
void check_counts(
    const std::vector<PlanStep>& plan,
    const OverlapPlanOptions& options) {
  std::deque<PlanStep> counted;
  for (const PlanStep& step : plan) {
    const bool makes_rows =
        step.pass == PlanPass::forward || step.pass == PlanPass::recompute;
    if (!makes_rows || step.layer < 0 ||
        !layer_graph(options, step.layer).has(PlanNode::dispatch)) {
      continue;
    }
    if (step.node == PlanNode::attend) {
      counted.push_back(step);
    } else if (step.node == PlanNode::dispatch) {
      const PlanStep first = counted.front();
      counted.pop_front();
      FLATSHARD_CHECK(
          first.microbatch == step.microbatch && first.layer == step.layer,
          internal,
          "an overlap plan has {} before the dispatch of {}",
          to_string(step),
          to_string(first));
    }
  }
}

}  // namespace

void check_plan(
    const std::vector<PlanStep>& plan,
    int layers,
    int microbatches,
    const OverlapPlanOptions& options) {
  const PlanPositions at = plan_positions(plan);
  const auto expected = plan_steps(layers, microbatches, options);
  for (const PlanStep& step : expected) {
    position(at, step);
    for (const PlanStep& earlier : plan_dependencies(step, layers, options)) {
      check_before(at, earlier, step);
    }
  }
  FLATSHARD_CHECK(
      plan.size() == expected.size(),
      internal,
      "an overlap plan of {} layers and {} microbatches: expected {} steps, "
      "got {}",
      layers,
      microbatches,
      expected.size(),
      plan.size());
  const auto check_passes = [&](const PlanStep& ends, const PlanStep& begins) {
    if (ends.microbatch >= 0) {
      check_before(at, ends, begins);
    }
  };
  const auto is_second = [&](int m) {
    return m > 0 && is_first_of_pair(m - 1, microbatches, options);
  };
  check_counts(plan, options);
  for (int m = 0; m < microbatches; ++m) {
    const PlanStep forward{PlanPass::forward, m, -1, PlanNode::embed};
    const PlanStep backward{PlanPass::backward, m, -1, PlanNode::head};
    if (is_second(m)) {
      check_pair(at, layers, m - 1, options);
    } else {
      check_passes({PlanPass::forward, m - 1, -1, PlanNode::head}, forward);
    }
    check_passes({PlanPass::backward, m - 1, -1, PlanNode::embed}, backward);
    check_passes(
        {PlanPass::backward, m - options.in_flight, -1, PlanNode::embed},
        forward);
  }
}

std::vector<PlanWait> plan_waits(
    const std::vector<PlanStep>& plan,
    int layers,
    const OverlapPlanOptions& options) {
  const PlanPositions at = plan_positions(plan);
  // For each stream, the position up to which a step can assume that all work
  // has finished.
  using Clock = std::array<int, 2>;
  std::vector<Clock> clocks(plan.size());
  std::array<Clock, 2> now{Clock{-1, -1}, Clock{-1, -1}};
  std::vector<PlanWait> waits;
  for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
    const auto own = static_cast<std::size_t>(plan[i].stream());
    const std::size_t other = 1 - own;
    Clock& clock = now[own];
    int latest = -1;
    for (const PlanStep& earlier :
         plan_dependencies(plan[i], layers, options)) {
      const int p = position(at, earlier);
      if (plan[p].stream() != plan[i].stream()) {
        latest = std::max(latest, p);
      }
    }
    if (latest > clock[other]) {
      waits.push_back({i, latest});
      for (std::size_t s = 0; s < clock.size(); ++s) {
        clock[s] = std::max(clock[s], clocks[latest][s]);
      }
    }
    clock[own] = i;
    clocks[i] = clock;
  }
  return waits;
}

}  // namespace flatshard
