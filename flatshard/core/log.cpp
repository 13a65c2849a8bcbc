#include "flatshard/core/log.h"

#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "flatshard/core/output.h"

namespace flatshard {
namespace {

LogLevel level_from_environment() {
  const char* text = std::getenv("FLATSHARD_LOG_LEVEL");
  const std::string_view name = text == nullptr ? "info" : text;
  if (name == "debug") {
    return LogLevel::debug;
  }
  if (name == "warning") {
    return LogLevel::warning;
  }
  if (name == "error") {
    return LogLevel::error;
  }
  return LogLevel::info;
}

std::mutex& prefix_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::string& prefix_cell() {
  static std::string prefix;
  return prefix;
}

}  // namespace

LogLevel log_level() {
  static const LogLevel level = level_from_environment();
  return level;
}

void set_log_prefix(std::string_view prefix) {
  const std::lock_guard lock(prefix_mutex());
  prefix_cell() = prefix;
}

void log_line(LogLevel level, std::string_view text) {
  std::string line;
  {
    const std::lock_guard lock(prefix_mutex());
    if (!prefix_cell().empty()) {
      line = "[" + prefix_cell() + "] ";
    }
  }
  if (level == LogLevel::warning) {
    line += "warning: ";
  } else if (level == LogLevel::error) {
    line += "error: ";
  } else if (level == LogLevel::debug) {
    line += "debug: ";
  }
  line += text;
  line += '\n';
  write_output(STDERR_FILENO, line);
}

}  // namespace flatshard
