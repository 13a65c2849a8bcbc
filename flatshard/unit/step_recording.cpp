#include "flatshard/unit/step_recording.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>

#include <utility>

namespace flatshard {

StepGraph::Recording::Recording(Runtime& runtime, const StepEffects* first)
    : runtime_(runtime),
      groups_(runtime.all_groups()),
      before_(runtime.scheduler_),
      scheduler_(runtime.scheduler_),
      is_last_microbatch_(runtime.is_last_microbatch_),
      sync_gradients_(runtime.sync_gradients_),
      measures_exposed_(runtime.executor_.streams().exposed().measures()) {
  const std::lock_guard lock(runtime_.mutex_);
  // Weights that rest whole count as gathered once they were spread, also by an
  // evaluation since; the graph is for steps in which nobody did that.
  before_.on({.kind = EventKind::weights_changed});
  if (first != nullptr) {
    before_ = first->before;
  }
  runtime_.scheduler_ = before_;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    GatherProgress& progress = groups_[g]->weights().progress();
    progress_.push_back(progress.forget());
    was_gathered_.push_back(
        first != nullptr ? first->groups[g].was_gathered
                         : progress.is_gathered());
    if (was_gathered_.back()) {
      progress.mark_gathered();
    }
    groups_[g]->gradients().zero();
  }
  generation_ = runtime_.seen_generation_;
  actions_ = std::exchange(runtime_.step_actions_, {});
  trace_ = std::exchange(runtime_.trace_, {});
  runtime_.executor_.streams().exposed().measure(false);
  runtime_.executor_.forget_queued();
  runtime_.executor_.streams().fork();
  accumulators_.emplace(runtime_.events_);
  runtime_.graphs_.constants()->begin();
}

StepGraph::Recording::~Recording() {
  if (!ended_) {
    restore();
  }
}

void StepGraph::Recording::check_rest() const {
  FLATSHARD_CHECK(
      runtime_.rests() && runtime_.executor_.slots().pool().num_held() == 0,
      usage,
      "the step of a graph ended and these units do not rest: {}; each forward "
      "in it needs its backward in it",
      fmt::join(runtime_.scheduler_.restless_units(), ", "));
  FLATSHARD_CHECK(
      !runtime_.graph_reads_weights_,
      usage,
      "the step of a graph has a backward with create_graph, whose graph reads "
      "the weights afterwards; run it without GraphOptions::whole_step");
  std::int64_t generation = 0;
  for (const auto& unit : runtime_.units_) {
    generation += unit->weights().generation();
  }
  FLATSHARD_CHECK(
      generation == generation_,
      usage,
      "the step of a graph changed weights; step the optimizer outside of "
      "StepGraph::run");
}

StepEffects StepGraph::Recording::end() {
  const std::lock_guard lock(runtime_.mutex_);
  check_rest();
  runtime_.executor_.streams().join();
  StepEffects effects{
      .before = before_,
      .scheduler = runtime_.scheduler_,
      .actions = runtime_.step_actions_,
      .events = runtime_.trace_.events,
      .constants = runtime_.graphs_.constants()->end(),
      .is_last_microbatch = runtime_.is_last_microbatch_,
      .sync_gradients = runtime_.sync_gradients_};
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    effects.groups.push_back(
        {.gradients = groups_[g]->gradients().take(),
         .is_gathered = groups_[g]->weights().progress().is_gathered(),
         .was_gathered = was_gathered_[g]});
  }
  ended_ = true;
  restore();
  return effects;
}

// Host alone: the recording may have failed.
void StepGraph::Recording::restore() {
  runtime_.graphs_.constants()->end();
  accumulators_.reset();
  runtime_.executor_.forget_queued();
  runtime_.executor_.streams().exposed().measure(measures_exposed_);
  runtime_.trace_ = std::move(trace_);
  runtime_.step_actions_ = std::move(actions_);
  runtime_.scheduler_ = std::move(scheduler_);
  runtime_.is_last_microbatch_ = is_last_microbatch_;
  runtime_.sync_gradients_ = sync_gradients_;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g]->gradients().zero();
    groups_[g]->weights().progress().restore(std::move(progress_[g]));
  }
}

}  // namespace flatshard
