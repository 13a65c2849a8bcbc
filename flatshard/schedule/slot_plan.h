#pragma once

#include "flatshard/schedule/actions.h"

#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace flatshard {

/// The use of a slot. The all-gathers for the forward and for the backward are
/// different uses and may have different offsets.
enum class SlotRole { forward_weights, backward_weights, gradients };

struct SlotKey {
  UnitId unit = kNoUnit;
  PlaneId plane = 0;  ///< of weights
  SlotRole role = SlotRole::forward_weights;
  PartId part = kWhole;  ///< of the plane

  auto operator<=>(const SlotKey&) const = default;
};

/// A key that is in use from one moment to another (half open) and its size.
struct SlotLifetime {
  SlotKey key;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t nbytes = 0;
};

/// Fixed offsets in one arena, such that uses at the same time never overlap.
/// Because the offset depends only on the key, addresses are stable while a
/// program repeats its events.
class SlotPlan {
 public:
  /// Slots, and their contents, start at multiples of this many bytes: a cache
  /// line, and enough for any vector load and for NCCL.
  static constexpr std::int64_t kAlignment = 256;

  SlotPlan() = default;

  /// Places the largest first at the lowest free offset (offline dynamic
  /// storage allocation by decreasing size). A key with several lifetimes gets
  /// one offset that is free in all of them.
  static SlotPlan build(std::span<const SlotLifetime> lifetimes);

  /// Returns the offset in bytes, or -1 when the plan lacks the key.
  std::int64_t offset(SlotKey key) const;
  std::int64_t arena_nbytes() const { return arena_nbytes_; }
  /// Returns the largest sum of sizes alive at one moment: no plan can need
  /// less.
  std::int64_t peak_nbytes() const { return peak_nbytes_; }
  std::size_t num_keys() const { return offsets_.size(); }

 private:
  std::map<SlotKey, std::int64_t> offsets_;
  std::int64_t arena_nbytes_ = 0;
  std::int64_t peak_nbytes_ = 0;
};

/// Reads the lifetimes of slots off a list of actions. Resident units need no
/// slot. Uses that are still open at the end last to its end.
std::vector<SlotLifetime> slot_lifetimes(
    std::span<const UnitSpec> units,
    std::span<const Action> actions);

}  // namespace flatshard
