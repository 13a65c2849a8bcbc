#pragma once

#include "flatshard/core/error.h"
#include "flatshard/nn/region.h"

#include <utility>

namespace flatshard {

/// Runs regions as if there were no runner, and keeps their declared constants
/// while something is recorded: a table may be replaced by a longer one later,
/// and the recording reads the first.
class KeptConstants : public nn::RegionRunner {
 public:
  /// Forgets what was kept before.
  void begin() {
    kept_.clear();
    keeps_ = true;
  }
  nn::TensorList end() {
    keeps_ = false;
    return std::exchange(kept_, {});
  }

  nn::TensorList run(
      nn::Module& owner,
      const char* name,
      nn::RegionFn fn,
      const nn::TensorList& inputs,
      const nn::RegionOptions& options) override {
    if (keeps_) {
      FLATSHARD_CHECK(
          !options.recompute || !options.recompute->preserve_rng,
          usage,
          "region {} of {} is recomputed with the random numbers of its "
          "forward (RecomputeOptions::preserve_rng), which one graph cannot "
          "draw twice",
          name,
          owner.name());
      kept_.insert(
          kept_.end(),
          options.constants.begin(),
          options.constants.end());
    }
    return nn::run_region(owner, std::move(fn), inputs, options);
  }

 private:
  bool keeps_ = false;
  nn::TensorList kept_;
};

}  // namespace flatshard
