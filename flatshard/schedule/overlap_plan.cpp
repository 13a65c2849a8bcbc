#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/layer_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace flatshard {
namespace {

// A step of a pair of layers: the backward of one microbatch and the forward of
// another run through it.
struct Choice {
  PlanPass pass;
  PlanNode node;
  int layers_before = 0;  ///< of the layer that the backward ran before
};

// The steps of a pair by priority. Others run where a step needs them.
using Policy = std::vector<Choice>;

Policy policy_of_pair() {
  using enum PlanPass;
  using enum PlanNode;
  return {
      {backward, combine},
      {recompute, attend},
      {recompute, dispatch},
      {backward, shared},
      {forward, attend},
      {backward, experts},
      {forward, dispatch},
      {wgrad, experts},
      {forward, shared},
      {forward, experts},
      {backward, dispatch},
      {forward, combine},
      {backward, attend},
      {wgrad, attend},
      {wgrad, shared}};
}

// A step of two forwards in one layer.
struct ForwardChoice {
  int which;  ///< 0: of the first microbatch, 1: of the second
  PlanNode node;
};

// Compute has the second one's attend while the host waits for the counts of
// the first one and launches its dispatch.
std::vector<ForwardChoice> policy_of_forwards() {
  using enum PlanNode;
  return {
      {0, attend},
      {1, attend},
      {0, dispatch},
      {0, shared},
      {0, experts},
      {1, dispatch},
      {0, combine},
      {1, shared},
      {1, experts},
      {1, combine}};
}

// Returns the number of forwards before the first backward.
int num_ahead(int microbatches, const OverlapPlanOptions& options) {
  return std::min(options.in_flight, microbatches) - 1;
}

// Weight gradients hide the exchange that was launched last.
Policy policy_of_backward() {
  using enum PlanPass;
  using enum PlanNode;
  return {
      {backward, combine},
      {wgrad, attend, 1},
      {wgrad, shared, 1},
      {recompute, attend},
      {recompute, dispatch},
      {backward, shared},
      {backward, experts},
      {backward, dispatch},
      {wgrad, experts},
      {backward, attend}};
}

class ListSchedule {
 public:
  ListSchedule(int layers, int microbatches, const OverlapPlanOptions& options)
      : layers_(layers), options_(options) {
    const auto steps = plan_steps(layers, microbatches, options);
    left_ = {steps.begin(), steps.end()};
  }

  /// The backward of `b` and the forward of `f`; microbatches that do not
  /// exist have no steps.
  void pair(const Policy& policy, int b, int f) {
    take({PlanPass::forward, f, -1, PlanNode::embed});
    take({PlanPass::backward, b, -1, PlanNode::head});
    for (int l = 0; l <= layers_; ++l) {
      for (const Choice& choice : policy) {
        const bool is_forward = choice.pass == PlanPass::forward;
        const int back = layers_ - 1 - l + choice.layers_before;
        take(
            {choice.pass,
             is_forward ? f : b,
             is_forward ? l : back,
             choice.node});
      }
    }
    take({PlanPass::backward, b, -1, PlanNode::embed});
    take({PlanPass::forward, f, -1, PlanNode::head});
  }

  /// The forwards of `m` and the next microbatch.
  void forwards(const std::vector<ForwardChoice>& policy, int m) {
    const auto take_both = [&](PlanNode node) {
      take({PlanPass::forward, m, -1, node});
      take({PlanPass::forward, m + 1, -1, node});
    };
    take_both(PlanNode::embed);
    for (int l = 0; l < layers_; ++l) {
      for (const ForwardChoice& choice : policy) {
        take({PlanPass::forward, m + choice.which, l, choice.node});
      }
    }
    take_both(PlanNode::head);
  }

  std::vector<PlanStep> plan() { return std::move(plan_); }

 private:
  void take(const PlanStep& step) {
    if (left_.erase(step) == 0) {
      return;
    }
    for (const PlanStep& earlier : plan_dependencies(step, layers_, options_)) {
      take(earlier);
    }
    plan_.push_back(step);
  }

  int layers_;
  const OverlapPlanOptions& options_;
  std::set<PlanStep> left_;
  std::vector<PlanStep> plan_;
};

}  // namespace

OverlapPlan
overlap_plan(int layers, int microbatches, const OverlapPlanOptions& options) {
  FLATSHARD_CHECK(
      layers >= 1 && microbatches >= 1 && options.in_flight >= 1,
      config,
      "an overlap plan: expected at least one layer, one microbatch and one in "
      "flight, got {}, {} and {}",
      layers,
      microbatches,
      options.in_flight);
  FLATSHARD_CHECK(
      options.dense.empty() ||
          options.dense.size() == static_cast<std::size_t>(layers),
      config,
      "an overlap plan of {} layers: expected as many entries in `dense`, or "
      "none, got {}",
      layers,
      options.dense.size());
  ListSchedule schedule(layers, microbatches, options);
  const Policy both = policy_of_pair();
  const Policy backward = policy_of_backward();
  const auto forwards = policy_of_forwards();
  const int ahead = num_ahead(microbatches, options);
  for (int f = 0; f < microbatches + ahead; ++f) {
    if (is_first_of_pair(f, microbatches, options)) {
      schedule.forwards(forwards, f);
    }
    if (ahead == 0) {
      schedule.pair(both, -1, f);
    }
    const bool is_alone = ahead == 0 || f >= microbatches;
    schedule.pair(is_alone ? backward : both, f - ahead, f);
  }
  return schedule.plan();
}

bool is_first_of_pair(
    int microbatch,
    int microbatches,
    const OverlapPlanOptions& options) {
  return microbatch % 2 == 0 &&
         microbatch + 1 < num_ahead(microbatches, options);
}

PlanStream stream_of(PlanNode node) {
  return node == PlanNode::dispatch || node == PlanNode::combine
             ? PlanStream::exchange
             : PlanStream::compute;
}

std::string_view to_string(PlanNode node) {
  constexpr std::array<std::string_view, 8> kNames{
      "embed",
      "attend",
      "dispatch",
      "shared",
      "experts",
      "combine",
      "merge",
      "head"};
  return kNames.at(static_cast<std::size_t>(node));
}

std::string to_string(const PlanStep& step) {
  constexpr std::string_view kPasses = "FRBW";
  const std::string text = fmt::format(
      "{}{}.{}",
      kPasses.at(static_cast<std::size_t>(step.pass)),
      step.microbatch,
      to_string(step.node));
  return step.layer < 0 ? text : fmt::format("{}({})", text, step.layer);
}

std::string to_string(const std::vector<PlanStep>& plan) {
  std::string text;
  for (const PlanStep& step : plan) {
    text += (text.empty() ? "" : " ") + to_string(step);
  }
  return text;
}

}  // namespace flatshard
