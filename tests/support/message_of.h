#pragma once

#include <exception>
#include <functional>
#include <string>

namespace flatshard::testing {

/// Returns the error of `function`, or "no error".
inline std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace flatshard::testing
