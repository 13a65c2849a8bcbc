#pragma once

#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/unit/slot_view.h"

#include <cstdint>
#include <memory>

namespace flatshard {

/// Fills a slot with bytes that are NaN in every floating type. On the current
/// stream.
void fill_with_nan(const SlotView& slot);

/// DebugOptions::poison: fills freed slots with NaN, and points resharded
/// parameters at memory that makes each use visible.
///
/// CPU: address space without memory. Touching it is a segmentation fault, and
/// a handler writes the parameter's name to standard error. The process then
/// ends as it would have, since the former handlers run next. CUDA: one block
/// of NaN as large as the largest parameter, for all of them.
class Poison : public SlotObserver, public StepObserver {
 public:
  /// Called before the first forward of `runtime`.
  static void install(const std::shared_ptr<Runtime>& runtime);
  /// Returns the size of the block that resharded parameters point at: 0 on the
  /// CPU and without DebugOptions::poison.
  static std::int64_t nbytes(const Runtime& runtime);

  bool wants_unused_slots() const override { return true; }
  void slot_unused(const SlotView& slot) override { fill_with_nan(slot); }
  /// The message names it; one step per process.
  void step_named(std::int64_t step) override;
};

}  // namespace flatshard
