#pragma once

#include "flatshard/graphs/kept_constants.h"
#include "flatshard/graphs/region_graphs.h"

#include <memory>

namespace flatshard {

class Runtime;

/// The graphs of a model, if GraphOptions request any: `Runtime::graphs()`.
class ModelGraphs {
 public:
  /// @param runtime  outlives this.
  explicit ModelGraphs(const std::shared_ptr<Runtime>& runtime);
  ModelGraphs(const ModelGraphs&) = delete;
  ModelGraphs& operator=(const ModelGraphs&) = delete;

  bool enabled() const { return regions_ || constants_; }
  /// Returns the runner that runs the regions of modules as graphs, or keeps
  /// their constants for the step's graph; null unless GraphOptions::enabled.
  std::shared_ptr<nn::RegionRunner> runner() const;
  /// Returns the graphs of regions, for callers that run units without an
  /// nn::Module. Null unless enabled, and with GraphOptions::whole_step.
  const std::shared_ptr<RegionGraphs>& regions() const { return regions_; }
  /// GraphOptions::whole_step: of the regions of a StepGraph. Null without it.
  const std::shared_ptr<KeptConstants>& constants() const { return constants_; }
  /// Returns the stats of regions. StepGraph has its own.
  GraphStats stats() const;
  /// Drops all graphs; regions and steps are captured again after another
  /// warm-up. Between two steps.
  void reset();

 private:
  Runtime& runtime_;
  std::shared_ptr<RegionGraphs> regions_;
  std::shared_ptr<KeptConstants> constants_;
};

/// Once, before the first step of a Runtime: it gets the graphs that its
/// GraphOptions request, possibly none.
/// @throws Error{config} that names an option that is incompatible with graphs.
void add_graphs(const std::shared_ptr<Runtime>& runtime);

}  // namespace flatshard
