#pragma once

#include <cstdint>
#include <string>

namespace flatshard {

std::string host_name();

/// Of the running kernel: the same host after a restart has another one. Empty
/// where the system does not say it.
std::string boot_id();

/// What the kernel says of a process now.
struct ProcessStat {
  char state = 0;  ///< 0: there is no such process
  /// When it began, in ticks since boot: tells it from its pid's next user.
  std::int64_t start_ticks = 0;
};

/// @param pid  of this pid namespace.
ProcessStat process_stat(std::int64_t pid);

}  // namespace flatshard
