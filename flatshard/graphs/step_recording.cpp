#include "flatshard/graphs/step_recording.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>

#include <utility>

namespace flatshard {

StepGraph::Recording::Recording(Runtime& runtime, const StepEffects* first)
    : core_(runtime.core()),
      constants_(*runtime.graphs().constants()),
      groups_(core_.all_groups()),
      before_(core_.step.scheduler),
      state_(core_.step),
      measures_exposed_(core_.executor.streams().exposed().measures()) {
  const std::lock_guard lock(core_.mutex);
  // Weights that are kept unsharded count as unsharded once they were spread,
  // also by an evaluation since. The graph is for steps without such an
  // evaluation.
  before_.on({.kind = EventKind::weights_changed});
  if (first != nullptr) {
    before_ = first->before;
  }
  core_.step.scheduler = before_;
  core_.step.actions.clear();
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
  trace_ = std::exchange(core_.trace, {});
  core_.executor.streams().exposed().measure(false);
  core_.executor.forget_queued();
  core_.executor.streams().fork();
  accumulators_.emplace(core_.events);
  constants_.begin();
}

StepGraph::Recording::~Recording() {
  if (!ended_) {
    restore();
  }
}

void StepGraph::Recording::check_rest() const {
  FLATSHARD_CHECK(
      core_.rests() && core_.executor.slots().pool().num_held() == 0,
      usage,
      "the step of a graph ended and these units are still in use: {}; each "
      "forward in it needs its backward in it",
      fmt::join(core_.step.scheduler.busy_units(), ", "));
  FLATSHARD_CHECK(
      !core_.step.graph_reads_weights,
      usage,
      "the step has a backward with create_graph, and its graph reads the "
      "weights afterwards; run it without GraphOptions::whole_step");
  std::int64_t generation = 0;
  for (const auto& unit : core_.units) {
    generation += unit->weights().generation();
  }
  FLATSHARD_CHECK(
      generation == core_.step.generation,
      usage,
      "the step of a graph changed weights; step the optimizer outside "
      "StepGraph::run");
}

StepEffects StepGraph::Recording::end() {
  const std::lock_guard lock(core_.mutex);
  check_rest();
  core_.executor.streams().join();
  StepEffects effects{
      .before = before_,
      .after = core_.step,
      .events = core_.trace.events,
      .constants = constants_.end()};
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

// Only on the host, because the recording may have failed.
void StepGraph::Recording::restore() {
  constants_.end();
  accumulators_.reset();
  core_.executor.forget_queued();
  core_.executor.streams().exposed().measure(measures_exposed_);
  core_.trace = std::move(trace_);
  state_.failure = std::move(core_.step.failure);  // what failed stays so
  core_.step = std::move(state_);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g]->gradients().zero();
    groups_[g]->weights().progress().restore(std::move(progress_[g]));
  }
}

}  // namespace flatshard
