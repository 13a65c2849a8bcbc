#pragma once

#include "flatshard/core/error.h"

#include <string_view>

namespace flatshard {

/// Runs `action`; its error about a file or a value gets the name of the
/// option that led there: "[data.train] io error: ...".
template <class F>
decltype(auto) for_option(std::string_view option, F&& action) {
  try {
    return action();
  } catch (const Error& e) {
    switch (e.code()) {
      case ErrorCode::config:
      case ErrorCode::io:
      case ErrorCode::format:
        throw e.with_context(option);
      default:
        throw;
    }
  }
}

}  // namespace flatshard
