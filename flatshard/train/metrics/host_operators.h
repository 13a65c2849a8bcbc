#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// The host time of an operator of torch, all its calls together.
struct HostOperator {
  std::string name;
  std::int64_t calls = 0;
  std::int64_t own_ns = 0;  ///< without the operators that it called
  std::int64_t all_ns = 0;
};

/// Returns a line for each of the first operators, with its self time and how
/// often it ran. The last line has no line end.
std::string to_string(const std::vector<HostOperator>& operators);

}  // namespace flatshard
