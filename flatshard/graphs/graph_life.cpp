#include "flatshard/graphs/graph_life.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {

std::string_view to_string(GraphPhase phase) {
  switch (phase) {
    case GraphPhase::watching:
      return "watching";
    case GraphPhase::capturing:
      return "capturing";
    case GraphPhase::captured:
      return "captured";
    case GraphPhase::outdated:
      return "outdated";
    case GraphPhase::failed:
      return "failed";
  }
  FLATSHARD_THROW(internal, "a phase {}", static_cast<int>(phase));
}

bool may_follow(GraphPhase from, GraphPhase to) {
  switch (to) {
    case GraphPhase::watching:
      return true;
    case GraphPhase::capturing:
      return from == GraphPhase::watching;
    case GraphPhase::captured:
    case GraphPhase::failed:
      return from == GraphPhase::capturing;
    case GraphPhase::outdated:
      return from == GraphPhase::captured || from == GraphPhase::outdated;
  }
  return false;
}

void GraphLife::move_to(GraphPhase to) {
  FLATSHARD_CHECK(
      may_follow(phase_, to),
      internal,
      "graphs are {} and cannot be {}",
      to_string(phase_),
      to_string(to));
  phase_ = to;
}

void GraphLife::restart(int num_steps) {
  move_to(GraphPhase::watching);
  num_steps_ = num_steps;
}

void GraphLife::fallback(const std::string& name, const std::string& reason) {
  if (++counts_.fallbacks[reason] == 1) {
    log_warning(
        "{} runs eagerly and not as a CUDA graph: {} (logged once for each "
        "reason)",
        name,
        reason);
  }
  FLATSHARD_CHECK(
      !options_.miss_is_error,
      usage,
      "{} cannot be replayed as a CUDA graph: {}; fix that, or let it run "
      "eagerly (GraphOptions::miss_is_error = false, cuda_graph.on_miss = "
      "\"eager\")",
      name,
      reason);
}

}  // namespace flatshard
