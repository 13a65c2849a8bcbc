#pragma once

#include <ostream>
#include <vector>

namespace flatshard::testing {

/// A program that once failed, as small as it could be made.
struct FoundProgram {
  const char* name;     ///< what was wrong, in CamelCase
  const char* program;  ///< JSON, as random_programs_test prints it

  friend std::ostream& operator<<(std::ostream& out, const FoundProgram& p) {
    return out << p.name;
  }
};

/// Returns every failure that random programs ever found; see found.cpp.
const std::vector<FoundProgram>& found_programs();

}  // namespace flatshard::testing
