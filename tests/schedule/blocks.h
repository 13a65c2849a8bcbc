#pragma once

#include "flatshard/schedule/events.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

inline constexpr std::int64_t kUnit = 1024;

/// Returns a root and `n` equal units below it, of kUnit bytes each.
inline std::vector<UnitSpec> blocks(int n, UnitSpec root = {.name = "root"}) {
  std::vector<UnitSpec> units{std::move(root)};
  for (int i = 0; i < n; ++i) {
    units.push_back(
        {.name = std::to_string(i),
         .parent = 0,
         .weights_nbytes = {kUnit},
         .grad_nbytes = kUnit});
  }
  return units;
}

}  // namespace flatshard::testing
