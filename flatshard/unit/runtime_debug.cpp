// What DebugOptions ask of the Runtime; nothing here runs without them.
#include "flatshard/core/error.h"
#include "flatshard/unit/poison.h"
#include "flatshard/unit/runtime.h"

#include <fmt/ranges.h>

#include <utility>

namespace flatshard {

void Runtime::set_step(std::int64_t step) {
  mesh_->set_step(step);
  executor_.set_step(step);
  if (options_.debug.poison) {
    set_poison_step(step);
  }
}

void Runtime::add_observer(std::shared_ptr<RuntimeObserver> observer) {
  const std::lock_guard lock(mutex_);
  observers_.add(std::move(observer));
}

void Runtime::say_next(UnitId next) {
  // After a backward that failed, reductions may still be under way; they use
  // the same communicator.
  executor_.streams().synchronize_reductions();
  compare_next(*mesh_, next, strict_->unit_names(), executor_.step());
}

void Runtime::finish_step() {
  if (!strict_) {
    return;
  }
  // First, so that a rank on which the rest fails does not leave others here.
  say_next(kNoUnit);
  const std::lock_guard lock(mutex_);
  strict_->end_step();
  FLATSHARD_CHECK(
      scheduler_.resting(),
      usage,
      "at the end of step {} these units do not rest: {}; a forward or "
      "backward of theirs has not ended",
      executor_.step(),
      fmt::join(scheduler_.restless_units(), ", "));
}

}  // namespace flatshard
