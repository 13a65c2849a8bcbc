#pragma once

#include "flatshard/runtime/graph_options.h"

#include <string>
#include <string_view>
#include <utility>

namespace flatshard {

/// The phase of captured graphs: of the regions of a model, or of its step.
/// docs/internals/graphs.md has the table of moves.
enum class GraphPhase {
  watching,   ///< calls run eagerly, until the warm-up is over
  capturing,  ///< recordings are made, between two steps
  captured,   ///< calls are replays, except those that differ
  outdated,   ///< likewise, but the next step starts over: inputs moved
  failed,     ///< the step could not be captured: eager until a reset
};
inline constexpr int kNumGraphPhases = 5;

std::string_view to_string(GraphPhase phase);
/// Returns whether `to` may follow `from`.
bool may_follow(GraphPhase from, GraphPhase to);

/// The phase of graphs, the steps since the last reset, and the calls that were
/// no replays: what RegionGraphs and StepGraph have in common.
class GraphLife {
 public:
  explicit GraphLife(GraphOptions options) : options_(std::move(options)) {}

  const GraphOptions& options() const { return options_; }
  GraphPhase phase() const { return phase_; }
  bool is(GraphPhase phase) const { return phase_ == phase; }
  /// Returns whether calls are replays, except those that differ.
  bool replays() const {
    return is(GraphPhase::captured) || is(GraphPhase::outdated);
  }

  /// @throws Error{internal} when `to` may not follow.
  void move_to(GraphPhase to);
  /// Captured graphs have to be captured again.
  void outdate() { move_to(GraphPhase::outdated); }
  /// All graphs were dropped.
  /// @param num_steps  that count for the next warm-up.
  void restart(int num_steps = 0);

  void step_begins() { ++num_steps_; }
  /// Returns whether enough steps before the current one were watched.
  bool is_warm() const { return num_steps_ > options_.warmup_steps; }

  /// Counts a call that runs eagerly after the warm-up, and logs each reason
  /// once.
  /// @throws Error{usage} with GraphOptions::miss_is_error.
  void fallback(const std::string& name, const std::string& reason);
  GraphStats& counts() { return counts_; }
  const GraphStats& counts() const { return counts_; }

  /// While it exists, recordings are made. If nothing follows, the graphs are
  /// watched as before.
  class Capturing {
   public:
    explicit Capturing(GraphLife& life) : life_(life) {
      life_.move_to(GraphPhase::capturing);
    }
    ~Capturing() {
      if (life_.is(GraphPhase::capturing)) {
        life_.phase_ = GraphPhase::watching;
      }
    }
    Capturing(const Capturing&) = delete;
    Capturing& operator=(const Capturing&) = delete;

   private:
    GraphLife& life_;
  };

 private:
  GraphOptions options_;
  GraphPhase phase_ = GraphPhase::watching;
  int num_steps_ = 0;  ///< that began since the last restart
  GraphStats counts_;
};

}  // namespace flatshard
