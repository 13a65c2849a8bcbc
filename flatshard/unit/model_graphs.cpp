#include "flatshard/unit/model_graphs.h"

#include "flatshard/unit/runtime.h"

#include <utility>

namespace flatshard {

void ModelGraphs::enable(
    const GraphOptions& options,
    std::weak_ptr<nn::WgradSink> sink) {
  if (options.whole_step) {
    constants_ = std::make_shared<KeptConstants>();
    return;
  }
  regions_ = std::make_shared<RegionGraphs>(
      runtime_.units_,
      runtime_.mesh_->device(),
      options,
      std::move(sink));
  runtime_.observers_.add(regions_);
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
  const std::lock_guard lock(runtime_.mutex_);
  ++runtime_.num_rule_changes_;
  if (regions_) {
    regions_->reset();
  }
}

}  // namespace flatshard
