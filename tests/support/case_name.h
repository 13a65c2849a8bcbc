#pragma once

#include <string>

namespace flatshard::testing {

/// Names the cases of INSTANTIATE_TEST_SUITE_P by their parameter's `name`, a
/// member or a function.
inline constexpr auto kCaseName = [](const auto& info) -> std::string {
  if constexpr (requires { info.param.name(); }) {
    return info.param.name();
  } else {
    return info.param.name;
  }
};

/// The same with the case's number, for parameters that share a name.
inline constexpr auto kNumberedCaseName = [](const auto& info) {
  return kCaseName(info) + "_" + std::to_string(info.index);
};

}  // namespace flatshard::testing
