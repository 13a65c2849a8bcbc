#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

std::string host_name();

/// Returns the id of the running kernel's boot: the same host after a restart
/// has another one. Empty where the system does not have it.
std::string boot_id();

/// The kernel's present state of a process.
struct ProcessStat {
  char state = 0;  ///< 0: there is no such process
  /// Start time in ticks since boot. Identifies the process among users of the
  /// same pid.
  std::int64_t start_ticks = 0;
};

/// @param pid  of this pid namespace.
ProcessStat process_stat(std::int64_t pid);

}  // namespace flatshard
