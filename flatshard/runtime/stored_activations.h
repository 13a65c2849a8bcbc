#pragma once

#include "flatshard/nn/wgrad.h"
#include "flatshard/schedule/events.h"

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace flatshard {

struct RuntimeCore;

/// Recomputed parts whose graph ended without a backward. A graph may end on
/// any thread and under the Runtime's lock, so it is only noted here. The next
/// root forward frees what the parts kept.
class AbandonedParts {
 public:
  using Part = std::pair<UnitId, CallId>;

  void add(UnitId unit, CallId call) {
    const std::lock_guard lock(mutex_);
    parts_.emplace_back(unit, call);
  }
  std::vector<Part> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(parts_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Part> parts_;
};

/// Adds to KeptActivations what a recomputed part of the innermost open forward
/// keeps, under the lock of `core`. See nn::RecomputeListener::store.
/// @param weak  to `core`.
std::unique_ptr<nn::StoredActivations> store_activations(
    RuntimeCore& core,
    const std::weak_ptr<RuntimeCore>& weak,
    std::vector<at::Tensor>& tensors);

}  // namespace flatshard
