#include "flatshard/schedule/overlap_events.h"

#include "flatshard/core/error.h"
#include "flatshard/schedule/layer_graph.h"

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

// Writes the events of the steps, in their order.
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

  /// Returns the events since the last call.
  std::vector<ScheduleEvent> take() { return std::exchange(events_, {}); }

 private:
  bool reads_last(const PlanStep& step) const {
    return step.node == layer_graph(options_, step.layer).last_with_weights();
  }

  int grads_of(const PlanStep& step) const {
    if (step.layer < 0) {
      return step.node == PlanNode::embed ? units_.embed_grads
                                          : units_.head_grads;
    }
    const PlanUnits::LayerGrads& grads = units_.layer_grads[step.layer];
    return step.node == PlanNode::attend    ? grads.attend
           : step.node == PlanNode::shared  ? grads.shared
           : step.node == PlanNode::experts ? grads.experts
                                            : 0;
  }

  void end_forward(UnitId unit, const PlanStep& step, bool needs_backward) {
    ScheduleEvent& end = say_of(unit, EventKind::forward_end, step);
    end.needs_backward = needs_backward;
    end.more_follow =
        is_first_of_pair(step.microbatch, last_microbatch_ + 1, options_);
    end.kept_nbytes = keeps(step) ? units_.kept_nbytes[step.layer] : 0;
  }
  /// Returns whether what the layer keeps leaves the device in between.
  bool keeps(const PlanStep& step) const {
    return step.layer >= 0 && !units_.kept_nbytes.empty();
  }
  ScheduleEvent& say(EventKind kind, const PlanStep& step) {
    return say_of(units_.unit_of(step), kind, step);
  }
  ScheduleEvent& say_of(UnitId unit, EventKind kind, const PlanStep& step) {
    // Each unit runs once in a microbatch.
    const auto num_units = static_cast<CallId>(units_.layers.size()) + 3;
    events_.push_back(
        {.kind = kind,
         .unit = unit,
         .call = step.microbatch * num_units + unit,
         .task = step.microbatch});
    return events_.back();
  }
  bool has_backward(const PlanStep& step) const {
    return units_.embed_has_backward || step.node != PlanNode::embed;
  }

  void add_forward(const PlanStep& step) {
    if (step.layer < 0) {
      if (step.node == PlanNode::embed) {
        say_of(units_.root, EventKind::forward_begin, step);
      }
      if (units_.ends) {
        say(EventKind::forward_begin, step);
        end_forward(units_.unit_of(step), step, has_backward(step));
      }
      if (step.node == PlanNode::head) {
        end_forward(units_.root, step, /*needs_backward=*/true);
      }
      return;
    }
    if (step.node == PlanNode::attend) {
      say(EventKind::forward_begin, step);
    }
    if (reads_last(step)) {
      end_forward(units_.unit_of(step), step, /*needs_backward=*/true);
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
      begin_backward_of(units_.root, step);
      for (int i = 0; i < units_.root_grads; ++i) {
        say_of(units_.root, EventKind::wgrad_done, step);
      }
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
    if (step.node == PlanNode::attend) {
      if (keeps(step)) {
        say(EventKind::kept_done, step);
      }
      say(EventKind::inputs_done, step);
    }
    if (units_.ends && step.layer < 0 && has_backward(step)) {
      say(EventKind::inputs_done, step);
    }
    if (step.node == PlanNode::embed) {
      say_of(units_.root, EventKind::inputs_done, step);
      say(EventKind::task_end, step).outermost = true;
    }
  }

  void begin_backward_of(UnitId unit, const PlanStep& step) {
    say_of(unit, EventKind::backward_begin, step).waits_for_inputs = true;
  }

  // Whatever the first step of a unit's backward is.
  void begin_layer(const PlanStep& step) {
    const UnitId unit = units_.unit_of(step);
    if (unit != units_.root && has_backward(step) &&
        begun_ != std::pair(step.microbatch, unit)) {
      begin_backward_of(unit, step);
      if (keeps(step)) {
        say(EventKind::kept_read, step);
      }
    }
    begun_ = {step.microbatch, unit};
  }

  void begin_task(const PlanStep& step) {
    const bool is_last = step.microbatch == last_microbatch_;
    say(EventKind::microbatch, step).is_last = is_last;
    ScheduleEvent& begin = say(EventKind::task_begin, step);
    begin.interleaved = options_.in_flight > 1 && !is_last;
    const auto expect = [&begin](UnitId unit, int grads) {
      begin.calls.emplace_back(unit, 1);
      if (grads > 0) {
        begin.expected.emplace_back(unit, grads);
      }
    };
    if (units_.ends) {
      expect(units_.root, units_.root_grads);
      if (units_.embed_has_backward) {
        expect(units_.ends->embed, units_.embed_grads);
      }
      expect(units_.ends->head, units_.head_grads);
    } else {
      expect(
          units_.root,
          units_.root_grads + units_.embed_grads + units_.head_grads);
    }
    for (std::size_t l = 0; l < units_.layers.size(); ++l) {
      const PlanUnits::LayerGrads& grads = units_.layer_grads[l];
      expect(units_.layers[l], grads.attend + grads.shared + grads.experts);
    }
  }

  const PlanUnits& units_;
  const OverlapPlanOptions& options_;
  int last_microbatch_ = 0;
  std::pair<int, UnitId> begun_{-1, -1};  ///< microbatch and unit
  std::vector<ScheduleEvent> events_;
};

}  // namespace

UnitId PlanUnits::unit_of(const PlanStep& step) const {
  if (step.layer >= 0) {
    return layers[step.layer];
  }
  if (!ends) {
    return root;
  }
  return step.node == PlanNode::embed ? ends->embed : ends->head;
}

std::vector<std::vector<ScheduleEvent>> plan_events_by_step(
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
  std::vector<std::vector<ScheduleEvent>> events;
  for (const PlanStep& step : plan) {
    writer.add(step);
    events.push_back(writer.take());
  }
  return events;
}

std::vector<ScheduleEvent> plan_events(
    const std::vector<PlanStep>& plan,
    const PlanUnits& units,
    const OverlapPlanOptions& options) {
  std::vector<ScheduleEvent> events;
  for (auto& of_step : plan_events_by_step(plan, units, options)) {
    events.insert(events.end(), of_step.begin(), of_step.end());
  }
  return events;
}

}  // namespace flatshard
