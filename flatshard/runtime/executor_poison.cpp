// What DebugOptions::poison asks of the Executor.
#include "flatshard/runtime/executor.h"
#include "flatshard/runtime/poison.h"

#include <fmt/format.h>

#include <algorithm>

namespace flatshard {

void Executor::poison_parameters() {
  std::vector<PoisonSpec> specs;
  for (const auto& unit : units_) {
    for (const UnitParameter& p : unit->parameters()) {
      specs.push_back({unit->name(), p.name, p.storage.nbytes()});
      if (mesh_->device().is_cuda()) {
        poison_nbytes_ = std::max(
            poison_nbytes_,
            static_cast<std::int64_t>(p.storage.nbytes()));
      }
    }
  }
  const auto memory = make_poison(
      mesh_->device(),
      fmt::format("rank {}/{}", mesh_->rank(), mesh_->size()),
      specs);
  std::size_t next = 0;
  for (const auto& unit : units_) {
    for (UnitParameter& p : unit->parameters()) {
      p.storage.set_released_memory(memory[next++]);
    }
    unit->pointers().clear();
  }
}

Event Executor::poison_after_reduction(const Unit& unit) {
  const UnitState& held = state(unit);
  // After an exception the slot may still be written by compute, and no
  // reduction follows.
  Event written;
  written.record(*streams_.compute());
  written.wait(*streams_.reduce());
  held.grads_read.wait(*streams_.reduce());
  streams_.reduce()->submit([slot = view(held.grads)] { fill_with_nan(slot); });
  Event last_use;
  last_use.record(*streams_.reduce());
  return last_use;
}

}  // namespace flatshard
