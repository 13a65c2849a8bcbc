#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

namespace flatshard {
namespace {

using PlanKey = std::tuple<PlanPass, int, int, PlanNode>;

PlanKey key_of(const PlanStep& s) {
  return {s.pass, s.microbatch, s.layer, s.node};
}

PlanStep step_of(PlanPass pass, int microbatch, int layer, PlanNode node) {
  return {pass, microbatch, layer, node, stream_of(node)};
}

// What there is in a model of so many layers.
struct PlanShape {
  int layers;
  const OverlapPlanOptions& options;

  bool has_experts(int l) const {
    return options.dense.empty() || !options.dense[l];
  }
  bool has_shared(int l) const {
    return options.shared_experts && has_experts(l);
  }
  // Where the tokens of a layer are complete.
  PlanNode last_node(int l) const {
    return has_experts(l) ? PlanNode::merge : PlanNode::attend;
  }
  std::vector<PlanNode> nodes(int l) const {
    if (!has_experts(l)) {
      return {PlanNode::attend};
    }
    std::vector<PlanNode> nodes{
        PlanNode::attend,
        PlanNode::dispatch,
        PlanNode::experts,
        PlanNode::combine,
        PlanNode::merge};
    if (has_shared(l)) {
      nodes.push_back(PlanNode::shared);
    }
    return nodes;
  }
};

bool has_weights(PlanNode node) {
  return node == PlanNode::attend || node == PlanNode::experts ||
         node == PlanNode::shared;
}

// A backward needs the rows that come before the experts' last product, and
// nothing behind it.
bool is_recomputed(PlanNode node) {
  return has_weights(node) || node == PlanNode::dispatch;
}

std::vector<PlanStep> all_steps(const PlanShape& shape, int microbatches) {
  std::vector<PlanStep> steps;
  for (int m = 0; m < microbatches; ++m) {
    for (const PlanNode node : {PlanNode::embed, PlanNode::head}) {
      steps.push_back(step_of(PlanPass::forward, m, -1, node));
      steps.push_back(step_of(PlanPass::backward, m, -1, node));
    }
    for (int l = 0; l < shape.layers; ++l) {
      for (const PlanNode node : shape.nodes(l)) {
        steps.push_back(step_of(PlanPass::forward, m, l, node));
        steps.push_back(step_of(PlanPass::backward, m, l, node));
        if (shape.options.recompute && is_recomputed(node)) {
          steps.push_back(step_of(PlanPass::recompute, m, l, node));
        }
        if (shape.options.delay_wgrad && has_weights(node)) {
          steps.push_back(step_of(PlanPass::wgrad, m, l, node));
        }
      }
    }
  }
  return steps;
}

class PlanDependencies {
 public:
  PlanDependencies(const PlanStep& step, const PlanShape& shape)
      : shape_(shape), m_(step.microbatch), l_(step.layer) {
    switch (step.pass) {
      case PlanPass::forward:
        of_forward(step.node);
        break;
      case PlanPass::recompute:
        of_recompute(step.node);
        break;
      case PlanPass::backward:
        of_backward(step.node);
        break;
      case PlanPass::wgrad:
        need(PlanPass::backward, l_, step.node);
        break;
    }
  }

  std::vector<PlanStep> take() { return std::move(steps_); }

 private:
  void need(PlanPass pass, int layer, PlanNode node) {
    steps_.push_back(step_of(pass, m_, layer, node));
  }

  void of_forward(PlanNode node) {
    switch (node) {
      case PlanNode::embed:
        break;
      case PlanNode::attend:
        need_tokens(l_ - 1);
        break;
      case PlanNode::dispatch:
      case PlanNode::shared:
        need(PlanPass::forward, l_, PlanNode::attend);
        break;
      case PlanNode::experts:
        need(PlanPass::forward, l_, PlanNode::dispatch);
        break;
      case PlanNode::combine:
        need(PlanPass::forward, l_, PlanNode::experts);
        break;
      case PlanNode::merge:
        need(PlanPass::forward, l_, PlanNode::combine);
        if (shape_.has_shared(l_)) {
          need(PlanPass::forward, l_, PlanNode::shared);
        }
        break;
      case PlanNode::head:
        need_tokens(shape_.layers - 1);
        break;
    }
  }

  // That layer `l` gives; the embedding for -1.
  void need_tokens(int l) {
    need(PlanPass::forward, l, l < 0 ? PlanNode::embed : shape_.last_node(l));
  }

  void of_recompute(PlanNode node) {
    if (node == PlanNode::attend) {
      need(PlanPass::backward, -1, PlanNode::head);
    } else {
      const bool behind = node == PlanNode::experts;
      need(
          PlanPass::recompute,
          l_,
          behind ? PlanNode::dispatch : PlanNode::attend);
    }
  }

  void of_backward(PlanNode node) {
    if (shape_.options.recompute && l_ >= 0 && has_weights(node)) {
      need(PlanPass::recompute, l_, node);
    }
    switch (node) {
      case PlanNode::head:
        need(PlanPass::forward, -1, PlanNode::head);
        break;
      case PlanNode::merge:
        need_gradient();
        break;
      case PlanNode::combine:
      case PlanNode::shared:
        need(PlanPass::backward, l_, PlanNode::merge);
        break;
      case PlanNode::experts:
        need(PlanPass::backward, l_, PlanNode::combine);
        break;
      case PlanNode::dispatch:
        need(PlanPass::backward, l_, PlanNode::experts);
        break;
      case PlanNode::attend:
        of_backward_of_attend();
        break;
      case PlanNode::embed:
        of_end();
        break;
    }
  }

  // Of this layer's tokens.
  void need_gradient() {
    const bool last = l_ == shape_.layers - 1;
    need(
        PlanPass::backward,
        last ? -1 : l_ + 1,
        last ? PlanNode::head : PlanNode::attend);
  }

  void of_backward_of_attend() {
    if (!shape_.has_experts(l_)) {
      need_gradient();
      return;
    }
    need(PlanPass::backward, l_, PlanNode::dispatch);
    if (shape_.has_shared(l_)) {
      need(PlanPass::backward, l_, PlanNode::shared);
    }
  }

  // The embedding's ends the microbatch: no gradient comes after it.
  void of_end() {
    need(PlanPass::backward, 0, PlanNode::attend);
    if (!shape_.options.delay_wgrad) {
      return;
    }
    for (int l = 0; l < shape_.layers; ++l) {
      for (const PlanNode node : shape_.nodes(l)) {
        if (has_weights(node)) {
          need(PlanPass::wgrad, l, node);
        }
      }
    }
  }

  const PlanShape& shape_;
  int m_;
  int l_;
  std::vector<PlanStep> steps_;
};

using PlanPositions = std::map<PlanKey, int>;

PlanPositions plan_positions(const std::vector<PlanStep>& plan) {
  PlanPositions at;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const bool is_new = at.emplace(key_of(plan[i]), i).second;
    FLATSHARD_CHECK(
        is_new,
        internal,
        "an overlap plan has {} twice",
        to_string(plan[i]));
  }
  return at;
}

int position(const PlanPositions& at, const PlanStep& step) {
  const auto found = at.find(key_of(step));
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
      "an overlap plan has {} before {}, which it depends on",
      to_string(later),
      to_string(earlier));
}

}  // namespace

std::vector<PlanStep> plan_dependencies(
    const PlanStep& step,
    int layers,
    const OverlapPlanOptions& options) {
  const PlanShape shape{layers, options};
  return PlanDependencies(step, shape).take();
}

void check_plan(
    const std::vector<PlanStep>& plan,
    int layers,
    int microbatches,
    const OverlapPlanOptions& options) {
  const PlanShape shape{layers, options};
  const PlanPositions at = plan_positions(plan);
  const std::vector<PlanStep> expected = all_steps(shape, microbatches);
  for (const PlanStep& step : expected) {
    const PlanStep& planned = plan[position(at, step)];
    FLATSHARD_CHECK(
        planned.stream == step.stream,
        internal,
        "an overlap plan has {} on the wrong stream",
        to_string(step));
    for (const PlanStep& earlier : PlanDependencies(step, shape).take()) {
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
  const auto begin = [](PlanPass pass, int m) {
    const bool is_forward = pass == PlanPass::forward;
    return step_of(pass, m, -1, is_forward ? PlanNode::embed : PlanNode::head);
  };
  const auto end = [](PlanPass pass, int m) {
    const bool is_forward = pass == PlanPass::forward;
    return step_of(pass, m, -1, is_forward ? PlanNode::head : PlanNode::embed);
  };
  for (int m = 1; m < microbatches; ++m) {
    check_before(
        at,
        end(PlanPass::forward, m - 1),
        begin(PlanPass::forward, m));
    check_before(
        at,
        end(PlanPass::backward, m - 1),
        begin(PlanPass::backward, m));
    if (m > 1) {
      check_before(
          at,
          end(PlanPass::backward, m - 2),
          begin(PlanPass::forward, m));
    }
  }
}

std::vector<PlanWait> plan_waits(
    const std::vector<PlanStep>& plan,
    int layers,
    const OverlapPlanOptions& options) {
  const PlanShape shape{layers, options};
  const PlanPositions at = plan_positions(plan);
  // By stream: up to which position of it a step knows that all is over.
  using Clock = std::array<int, 2>;
  std::vector<Clock> clocks(plan.size());
  std::array<Clock, 2> now{Clock{-1, -1}, Clock{-1, -1}};
  std::vector<PlanWait> waits;
  for (int i = 0; i < static_cast<int>(plan.size()); ++i) {
    const auto own = static_cast<std::size_t>(plan[i].stream);
    const std::size_t other = 1 - own;
    Clock& clock = now[own];
    int latest = -1;
    for (const PlanStep& earlier : PlanDependencies(plan[i], shape).take()) {
      const int p = position(at, earlier);
      if (plan[p].stream != plan[i].stream) {
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
