#include "flatshard/schedule/events.h"

#include <numeric>

namespace flatshard {

PlaneId UnitSpec::slice(PlaneId plane, PartId part) const {
  if (part == kWhole) {
    return plane;
  }
  PlaneId slice = static_cast<PlaneId>(weights_nbytes.size()) + part;
  for (PlaneId before = 0; before < plane; ++before) {
    slice += num_parts(before);
  }
  return slice;
}

UnitSpec::PlanePart UnitSpec::plane_part(PlaneId slice) const {
  PartId part = slice - static_cast<PlaneId>(weights_nbytes.size());
  if (part < 0) {
    return {slice, kWhole};
  }
  PlaneId plane = 0;
  while (part >= num_parts(plane)) {
    part -= num_parts(plane++);
  }
  return {plane, part};
}

int UnitSpec::num_slices() const {
  return std::accumulate(
      part_nbytes.begin(),
      part_nbytes.end(),
      static_cast<int>(weights_nbytes.size()),
      [](int sum, const auto& parts) {
        return sum + static_cast<int>(parts.size());
      });
}

PlaneSet UnitSpec::parts(PlaneId plane) const {
  PlaneSet slices;
  for (PartId part = 0; part < num_parts(plane); ++part) {
    slices.insert(slice(plane, part));
  }
  return slices;
}

PlaneId UnitSpec::source(PlaneId slice) const {
  const auto [plane, part] = plane_part(slice);
  const auto p = static_cast<std::size_t>(plane);
  if (p >= derived_from.size() || derived_from[p] == kStored) {
    return kStored;
  }
  return this->slice(derived_from[p], part);
}

}  // namespace flatshard
