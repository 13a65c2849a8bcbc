#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>

namespace flatshard {

/// One representation of a unit's weights among those that are all-gathered for
/// it, e.g. rows for the forward and columns for the backward. From 0, and the
/// same number for a group of the unit (WeightPlanes::planes).
using PlaneId = int;
/// The plane that parameters point at while their unit is unsharded. Every unit
/// has it.
inline constexpr PlaneId kComputePlane = 0;
/// PlaneId of no plane: the source of a plane that is all-gathered itself.
inline constexpr PlaneId kStored = -1;
/// UnitSpec::post_forward of units that have none.
inline constexpr PlaneId kNoPlane = -1;
/// A contiguous run of a plane, e.g. one submodule's. From 0.
using PartId = int;

/// All of a plane, in one slot.
inline constexpr PartId kWhole = -1;

/// How planes that consist of parts are divided into all-gathers.
enum class GatherParts {
  unit,        ///< entire planes only
  recomputed,  ///< entire planes; if the backward does not read one, only
               ///< the parts that a recompute read in the last backward
  module,      ///< part by part, each awaited on request
};

/// Planes of one unit, and parts of planes: UnitSpec::slice numbers both.
class PlaneSet {
 public:
  static constexpr int kMaxPlanes = 64;

  constexpr PlaneSet() = default;
  constexpr PlaneSet(std::initializer_list<PlaneId> planes) {
    for (const PlaneId plane : planes) {
      insert(plane);
    }
  }
  /// Whatever planes a unit has.
  static constexpr PlaneSet all() { return PlaneSet(~std::uint64_t{0}); }

  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool contains(PlaneId plane) const {
    return (bits_ >> plane & 1U) != 0;
  }
  constexpr void insert(PlaneId plane) { bits_ |= std::uint64_t{1} << plane; }

  /// Returns the planes in both / in `a` and not in `b` / in one of them.
  friend constexpr PlaneSet operator&(PlaneSet a, PlaneSet b) {
    return PlaneSet(a.bits_ & b.bits_);
  }
  friend constexpr PlaneSet operator-(PlaneSet a, PlaneSet b) {
    return PlaneSet(a.bits_ & ~b.bits_);
  }
  friend constexpr PlaneSet operator|(PlaneSet a, PlaneSet b) {
    return PlaneSet(a.bits_ | b.bits_);
  }
  constexpr bool operator==(const PlaneSet&) const = default;

  /// Calls `function` with each plane, in rising order.
  template <class F>
  constexpr void for_each(F&& function) const {
    for (std::uint64_t left = bits_; left != 0; left &= left - 1) {
      function(PlaneId{std::countr_zero(left)});
    }
  }

 private:
  explicit constexpr PlaneSet(std::uint64_t bits) : bits_(bits) {}

  std::uint64_t bits_ = 0;
};

}  // namespace flatshard
