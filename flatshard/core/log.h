#pragma once

#include <fmt/format.h>

#include <string_view>

namespace flatshard {

enum class LogLevel { debug, info, warning, error };

/// Returns the level below which lines are dropped. Default: info, or
/// FLATSHARD_LOG_LEVEL (debug, info, warning, error) when it is set.
LogLevel log_level();

/// Sets the text put before each line, e.g. "rank 3/8". One per process.
void set_log_prefix(std::string_view prefix);

/// Writes one line to standard error, never interleaved, from any thread.
void log_line(LogLevel level, std::string_view text);

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (level >= log_level()) {
    log_line(level, fmt::format(format, std::forward<Args>(args)...));
  }
}

template <class... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::debug, format, std::forward<Args>(args)...);
}

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::info, format, std::forward<Args>(args)...);
}

template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::warning, format, std::forward<Args>(args)...);
}

template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::error, format, std::forward<Args>(args)...);
}

}  // namespace flatshard
