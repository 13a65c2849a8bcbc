#pragma once

#include "flatshard/schedule/slot_plan.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace flatshard::plan {

/// The arena of a SlotPlan on paper: which operations last used a place, so
/// that its next use waits for them. It does what SlotPool does with events.
class SlotPlaces {
 public:
  SlotPlaces() = default;
  explicit SlotPlaces(SlotPlan plan) : places_(std::move(plan)) {}

  const SlotPlan& plan() const { return places_; }

  /// Allocates a slot. @return the operations that it waits for.
  std::vector<int>
  acquire(const SlotKey& key, std::int64_t nbytes, std::int64_t& place) {
    std::vector<int> waits;
    const std::int64_t begin = places_.offset(key);
    if (begin < 0 || nbytes == 0) {
      place = -1;
      return waits;
    }
    const std::int64_t end = begin + nbytes;
    for (const Tenant& tenant : tenants_) {
      if (tenant.begin < end && begin < tenant.end) {
        waits.insert(
            waits.end(),
            tenant.last_use.begin(),
            tenant.last_use.end());
      }
    }
    std::erase_if(tenants_, [&](const Tenant& tenant) {
      return tenant.begin >= begin && tenant.end <= end;
    });
    tenants_.push_back({begin, end, true, {}});
    place = begin;
    return waits;
  }

  void give_back(std::int64_t& place, std::vector<int> last_use) {
    if (place < 0) {
      return;
    }
    const auto tenant = std::ranges::find_if(tenants_, [&](const Tenant& t) {
      return t.held && t.begin == place;
    });
    if (tenant != tenants_.end()) {
      tenant->held = false;
      tenant->last_use = std::move(last_use);
    }
    place = -1;
  }

 private:
  /// A use of memory in the arena, as SlotPool has them.
  struct Tenant {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool held = false;
    std::vector<int> last_use;
  };

  SlotPlan places_;
  std::vector<Tenant> tenants_;
};

}  // namespace flatshard::plan
