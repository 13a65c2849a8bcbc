#include "flatshard/graphs/model_graphs.h"

#include "flatshard/runtime/runtime.h"

namespace flatshard {

ModelGraphs::ModelGraphs(const std::shared_ptr<Runtime>& runtime)
    : runtime_(*runtime) {
  const GraphOptions& options = runtime->core().options.graphs;
  if (!options.enabled) {
    return;
  }
  if (options.whole_step) {
    constants_ = std::make_shared<KeptConstants>();
    return;
  }
  regions_ = std::make_shared<RegionGraphs>(
      runtime->units(),
      runtime->mesh()->device(),
      options,
      runtime);
  runtime->add_observer(regions_);
}

std::shared_ptr<nn::RegionRunner> ModelGraphs::runner() const {
  if (constants_) {
    return constants_;
  }
  return regions_;
}

GraphStats ModelGraphs::stats() const {
  return regions_ ? regions_->stats() : GraphStats{};
}

void ModelGraphs::reset() {
  RuntimeCore& core = runtime_.core();
  const std::lock_guard lock(core.mutex);
  ++core.num_rule_changes;
  if (regions_) {
    regions_->reset();
  }
}

void add_graphs(const std::shared_ptr<Runtime>& runtime) {
  const RuntimeOptions& options = runtime->core().options;
  if (options.graphs.enabled) {
    check_graph_options(options, runtime->mesh()->device(), runtime->units());
  }
  runtime->set_graphs(std::make_shared<ModelGraphs>(runtime));
}

}  // namespace flatshard
