#pragma once

#include "flatshard/runtime/observer.h"
#include "flatshard/runtime/runtime.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// A piece of memory somebody uses, with a name for messages.
struct UsedRange {
  std::string name;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;  ///< after the last byte
};

/// @throws Error{memory} naming the first two ranges that share a byte. Empty
/// ranges share nothing.
void check_disjoint(std::vector<UsedRange> ranges, const std::string& where);

/// One planned use of the arena: from one moment to another (half open), at an
/// offset.
struct PlacedUse {
  std::string name;
  std::int64_t begin = 0, end = 0;
  std::int64_t offset = 0, nbytes = 0;
};

/// @throws Error{memory} naming two uses that overlap in time and place, or one
/// that leaves the arena.
void check_placement(
    const std::vector<PlacedUse>& uses,
    std::int64_t arena_nbytes);

/// Finds buffers that overlap.
///
/// On install: checks the persistent buffers of all groups, the offsets of the
/// parameters in their slots, and the plan of the slots. While training:
/// compares every slot that is acquired with the slots in use, and every
/// parameter with the slot of its unit. It tracks slots independently and does
/// not rely on the pool's records.
class OverlapCheck : public SlotObserver {
 public:
  /// Checks `runtime` now and watches it from now on.
  static std::shared_ptr<OverlapCheck> install(
      const std::shared_ptr<Runtime>& runtime);

  void slot_acquired(const Unit& unit, const SlotKey& key, const Slot& slot)
      override;
  void slot_released(const Unit& unit, const Slot& slot) override;
  void parameters_pointed(Unit& unit, const SlotView& slot) override;
  void slots_planned(
      const SlotPlan& plan,
      const std::vector<SlotLifetime>& lifetimes) override;

 private:
  std::vector<std::string> unit_names_;
  std::map<const void*, UsedRange> held_;  ///< by address
};

}  // namespace flatshard
