#include "flatshard/core/process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <iterator>
#include <sstream>

namespace flatshard {

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// /proc/PID/stat: "pid (name) state ppid ...", where the start time is field
// 22. The name may contain spaces and parentheses.
ProcessStat process_stat(std::int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) {
    return {};
  }
  constexpr int kBetween = 18;  // fields 4 to 21
  std::istringstream fields(text.substr(name_end + 1));
  ProcessStat stat;
  fields >> stat.state;
  std::string skipped;
  for (int i = 0; i < kBetween; ++i) {
    fields >> skipped;
  }
  fields >> stat.start_ticks;
  return fields ? stat : ProcessStat{};
}

}  // namespace flatshard
