#include "flatshard/schedule/overlap_plan.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

using PlanKey = std::tuple<PlanPass, int, int, PlanNode>;

PlanKey key_of(const PlanStep& s) {
  return {s.pass, s.microbatch, s.layer, s.node};
}

PlanStep step_of(PlanPass pass, int microbatch, int layer, PlanNode node) {
  return {pass, microbatch, layer, node, stream_of(node)};
}

// A node of a layer. What it depends on follows from its edges, in all passes.
struct LayerNode {
  PlanNode node{};
  bool has_weights = false;
  std::vector<PlanNode> reads = {};  ///< results of these; none: the tokens
  /// A node with weights depends on it, so a recompute runs it as well.
  bool is_recomputed = false;
};

// The nodes of one layer, in an order that keeps to their edges.
class LayerGraph {
 public:
  LayerGraph(bool has_experts, bool has_shared) {
    add({PlanNode::attend, true});
    if (has_experts) {
      add({PlanNode::dispatch, false, {PlanNode::attend}});
      add({PlanNode::experts, true, {PlanNode::dispatch}});
      add({PlanNode::combine, false, {PlanNode::experts}});
      add({PlanNode::merge, false, {PlanNode::combine}});
    }
    if (has_shared) {
      add({PlanNode::shared, true, {PlanNode::attend}});
      find(PlanNode::merge).reads.push_back(PlanNode::shared);
    }
  }

  const std::vector<LayerNode>& nodes() const { return nodes_; }
  const LayerNode& of(PlanNode node) const {
    return *std::ranges::find(nodes_, node, &LayerNode::node);
  }
  std::vector<PlanNode> readers_of(PlanNode node) const {
    std::vector<PlanNode> readers;
    for (const LayerNode& reader : nodes_) {
      if (std::ranges::find(reader.reads, node) != reader.reads.end()) {
        readers.push_back(reader.node);
      }
    }
    return readers;
  }
  // Where the tokens of the layer are complete: no node reads its result.
  PlanNode last() const {
    return std::ranges::find_if(
               nodes_,
               [&](const LayerNode& of) { return readers_of(of.node).empty(); })
        ->node;
  }

 private:
  LayerNode& find(PlanNode node) {
    return *std::ranges::find(nodes_, node, &LayerNode::node);
  }
  void add(LayerNode node) {
    nodes_.push_back(std::move(node));
    if (nodes_.back().has_weights) {
      recompute(nodes_.back().node);
    }
  }
  void recompute(PlanNode node) {
    find(node).is_recomputed = true;
    for (const PlanNode earlier : find(node).reads) {
      recompute(earlier);
    }
  }

  std::vector<LayerNode> nodes_;
};

// What there is in a model of so many layers.
struct PlanShape {
  int layers;
  const OverlapPlanOptions& options;

  const LayerGraph& graph(int l) const {
    static const LayerGraph dense(false, false);
    static const LayerGraph experts(true, false);
    static const LayerGraph with_shared(true, true);
    const bool has_experts = options.dense.empty() || !options.dense[l];
    return !has_experts             ? dense
           : options.shared_experts ? with_shared
                                    : experts;
  }
};

std::vector<PlanStep> all_steps(const PlanShape& shape, int microbatches) {
  std::vector<PlanStep> steps;
  for (int m = 0; m < microbatches; ++m) {
    for (const PlanNode node : {PlanNode::embed, PlanNode::head}) {
      steps.push_back(step_of(PlanPass::forward, m, -1, node));
      steps.push_back(step_of(PlanPass::backward, m, -1, node));
    }
    for (int l = 0; l < shape.layers; ++l) {
      for (const LayerNode& of : shape.graph(l).nodes()) {
        steps.push_back(step_of(PlanPass::forward, m, l, of.node));
        steps.push_back(step_of(PlanPass::backward, m, l, of.node));
        if (shape.options.recompute && of.is_recomputed) {
          steps.push_back(step_of(PlanPass::recompute, m, l, of.node));
        }
        if (shape.options.delay_wgrad && of.has_weights) {
          steps.push_back(step_of(PlanPass::wgrad, m, l, of.node));
        }
      }
    }
  }
  return steps;
}

// A node runs after those that it reads, its backward after those of its
// readers.
class PlanDependencies {
 public:
  PlanDependencies(const PlanStep& step, const PlanShape& shape)
      : shape_(shape), m_(step.microbatch), l_(step.layer) {
    if (l_ < 0) {
      of_ends(step);
      return;
    }
    const LayerGraph& graph = shape_.graph(l_);
    const LayerNode& of = graph.of(step.node);
    switch (step.pass) {
      case PlanPass::forward:
        need_tokens_if(of.reads.empty(), l_ - 1);
        need_all(PlanPass::forward, of.reads);
        break;
      case PlanPass::recompute:
        if (of.reads.empty()) {
          need(PlanPass::backward, -1, PlanNode::head);
        }
        need_all(PlanPass::recompute, of.reads);
        break;
      case PlanPass::backward:
        if (shape_.options.recompute && of.has_weights) {
          need(PlanPass::recompute, l_, step.node);
        }
        need_all(PlanPass::backward, graph.readers_of(step.node));
        if (step.node == graph.last()) {
          need_gradient();
        }
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
  void need_all(PlanPass pass, const std::vector<PlanNode>& nodes) {
    for (const PlanNode node : nodes) {
      need(pass, l_, node);
    }
  }
  // That layer `l` gives; the embedding for -1.
  void need_tokens_if(bool reads_tokens, int l) {
    if (reads_tokens) {
      need(
          PlanPass::forward,
          l,
          l < 0 ? PlanNode::embed : shape_.graph(l).last());
    }
  }
  // Of this layer's tokens, which the node that reads the next one's gives.
  void need_gradient() {
    const bool last = l_ == shape_.layers - 1;
    need(
        PlanPass::backward,
        last ? -1 : l_ + 1,
        last ? PlanNode::head : PlanNode::attend);
  }

  // The embedding's backward ends the microbatch: no gradient comes after it.
  void of_ends(const PlanStep& step) {
    if (step.node == PlanNode::head) {
      const bool is_forward = step.pass == PlanPass::forward;
      need_tokens_if(is_forward, shape_.layers - 1);
      if (!is_forward) {
        need(PlanPass::forward, -1, PlanNode::head);
      }
      return;
    }
    if (step.pass == PlanPass::forward) {
      return;
    }
    need(PlanPass::backward, 0, PlanNode::attend);
    for (int l = 0; shape_.options.delay_wgrad && l < shape_.layers; ++l) {
      for (const LayerNode& of : shape_.graph(l).nodes()) {
        if (of.has_weights) {
          need(PlanPass::wgrad, l, of.node);
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
