#pragma once

#include "flatshard/schedule/events.h"
#include "flatshard/shape/group_plan.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flatshard {

/// A unit before it has memory.
struct UnitShape {
  std::string name;
  UnitId parent = kNoUnit;
  std::vector<GroupShape> groups;
  UnitPolicy policy;
};

/// The places of the planes and gradients of a unit's groups in its slots.
struct UnitLayout {
  /// @param unit  its name, for a warning.
  UnitLayout(const std::string& unit, std::span<const GroupPlan* const> groups);

  /// A part of the unit's planes is a part of one group's planes.
  struct Part {
    std::size_t group = 0;
    PartId part = kWhole;
  };

  /// The planes, their slices and the gradients for the Scheduler. The bytes
  /// are the slots'.
  UnitSpec slots;
  /// The offsets by plane and group, bytes in the slot.
  std::vector<std::vector<std::int64_t>> offsets;
  /// The same in the slot of gradients, by group.
  std::vector<std::int64_t> grad_offsets;
  std::vector<Part> parts;  ///< none: planes are all-gathered as one

  /// Returns the description for the Scheduler.
  UnitSpec spec(std::string name, UnitId parent, UnitPolicy policy) const;

 private:
  void find_parts(
      const std::string& unit,
      std::span<const GroupPlan* const> groups);
  void add_plane(PlaneId plane, std::span<const GroupPlan* const> groups);
  void add_post_forward_plane(std::span<const GroupPlan* const> groups);
  void add_gradients(std::span<const GroupPlan* const> groups);

  /// The bytes of resident compute planes that an all-gather brings up to date.
  /// They have no slot.
  std::int64_t refreshed_nbytes_ = 0;
};

/// A unit with its groups, and its description for the Scheduler.
struct UnitPlan {
  explicit UnitPlan(const UnitShape& shape);

  std::vector<GroupPlan> groups;
  UnitSpec spec;
};

}  // namespace flatshard
