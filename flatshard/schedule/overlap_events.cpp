#include "flatshard/schedule/overlap_events.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// Says the events of one step after the other.
class EventWriter {
 public:
  EventWriter(
      const std::vector<PlanStep>& plan,
      const PlanUnits& units,
      const OverlapPlanOptions& options)
      : units_(units), options_(options) {
    for (const PlanStep& step : plan) {
      last_microbatch_ = std::max(last_microbatch_, step.microbatch);
    }
  }

  void add(const PlanStep& step) {
    switch (step.pass) {
      case PlanPass::forward:
        add_forward(step);
        break;
      case PlanPass::recompute:
        add_recompute(step);
        break;
      case PlanPass::backward:
        add_backward(step);
        break;
      case PlanPass::wgrad:
        for (int i = 0; i < grads_of(step); ++i) {
          say(EventKind::wgrad_done, step).deferred = true;
        }
        break;
    }
  }

  std::vector<ScheduleEvent> take() { return std::move(events_); }

 private:
  bool is_dense(int l) const {
    return !options_.dense.empty() && options_.dense[l];
  }
  UnitId unit_of(const PlanStep& step) const {
    return step.layer < 0 ? units_.root : units_.layers[step.layer];
  }
  bool reads_last(const PlanStep& step) const {
    return step.node ==
           (is_dense(step.layer) ? PlanNode::attend : PlanNode::experts);
  }

  int grads_of(const PlanStep& step) const {
    switch (step.node) {
      case PlanNode::embed:
        return units_.embed_grads;
      case PlanNode::head:
        return units_.head_grads;
      case PlanNode::attend:
        return units_.layer_grads[step.layer].attend;
      case PlanNode::shared:
        return units_.layer_grads[step.layer].shared;
      case PlanNode::experts:
        return units_.layer_grads[step.layer].experts;
      default:
        return 0;
    }
  }

  ScheduleEvent& say(EventKind kind, const PlanStep& step) {
    const auto num_units = static_cast<CallId>(units_.layers.size()) + 1;
    events_.push_back(
        {.kind = kind,
         .unit = unit_of(step),
         .call = step.microbatch * num_units + step.layer + 1,
         .task = step.microbatch});
    return events_.back();
  }

  void add_forward(const PlanStep& step) {
    if (step.node == PlanNode::embed || step.node == PlanNode::attend) {
      say(EventKind::forward_begin, step);
    }
    if (step.layer < 0 ? step.node == PlanNode::head : reads_last(step)) {
      say(EventKind::forward_end, step).needs_backward = true;
    }
  }

  void add_recompute(const PlanStep& step) {
    if (step.node == PlanNode::attend) {
      begin_layer(step);
      say(EventKind::recompute_begin, step);
    }
    if (reads_last(step)) {
      say(EventKind::recompute_end, step);
    }
  }

  void add_backward(const PlanStep& step) {
    if (step.node == PlanNode::head) {
      begin_task(step);
    }
    begin_layer(step);
    const int n = grads_of(step);
    if (options_.delay_wgrad && step.layer >= 0) {
      if (n > 0) {
        say(EventKind::wgrad_deferred, step).count = n;
      }
    } else {
      for (int i = 0; i < n; ++i) {
        say(EventKind::wgrad_done, step);
      }
    }
    if (step.node == PlanNode::attend || step.node == PlanNode::embed) {
      say(EventKind::inputs_done, step);
    }
    if (step.node == PlanNode::embed) {
      say(EventKind::task_end, step).outermost = true;
    }
  }

  // Whatever the first step of a unit's backward is.
  void begin_layer(const PlanStep& step) {
    if (step.microbatch == begun_.first && step.layer == begun_.second) {
      return;
    }
    const bool is_new = step.node != PlanNode::embed;
    begun_ = {step.microbatch, step.layer};
    if (is_new) {
      say(EventKind::backward_begin, step).waits_for_inputs = true;
    }
  }

  void begin_task(const PlanStep& step) {
    const bool is_last = step.microbatch == last_microbatch_;
    say(EventKind::microbatch, step).is_last = is_last;
    ScheduleEvent& begin = say(EventKind::task_begin, step);
    begin.interleaved = options_.interleave && !is_last;
    const auto expect = [&begin](UnitId unit, int grads) {
      begin.calls.emplace_back(unit, 1);
      if (grads > 0) {
        begin.expected.emplace_back(unit, grads);
      }
    };
    expect(units_.root, units_.embed_grads + units_.head_grads);
    for (std::size_t l = 0; l < units_.layers.size(); ++l) {
      const PlanUnits::LayerGrads& grads = units_.layer_grads[l];
      expect(units_.layers[l], grads.attend + grads.shared + grads.experts);
    }
  }

  const PlanUnits& units_;
  const OverlapPlanOptions& options_;
  int last_microbatch_ = 0;
  std::pair<int, int> begun_{-1, -1};  ///< microbatch and layer
  std::vector<ScheduleEvent> events_;
};

}  // namespace

std::vector<ScheduleEvent> plan_events(
    const std::vector<PlanStep>& plan,
    const PlanUnits& units,
    const OverlapPlanOptions& options) {
  FLATSHARD_CHECK(
      units.layers.size() == units.layer_grads.size(),
      internal,
      "events of an overlap plan: {} layers and gradients of {}",
      units.layers.size(),
      units.layer_grads.size());
  EventWriter writer(plan, units, options);
  for (const PlanStep& step : plan) {
    writer.add(step);
  }
  return writer.take();
}

}  // namespace flatshard
