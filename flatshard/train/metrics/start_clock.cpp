#include "flatshard/train/metrics/start_clock.h"

#include <fmt/format.h>

#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace flatshard {
namespace {

/// Returns the age of a process in seconds, to 10 ms; 0 without /proc.
double age_s(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  // The name may contain blanks. Fields 3 to 22 follow it.
  const auto name_end = stat.rfind(')');
  if (name_end == std::string::npos) {
    return 0;
  }
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) {
    fields >> field;
  }
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  const double began = std::strtod(field.c_str(), nullptr) /
                       static_cast<double>(::sysconf(_SC_CLK_TCK));
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec) - began;
}

}  // namespace

StartClock::StartClock(bool by_launcher)
    : begin_(std::chrono::steady_clock::now()),
      times_{.program_s = age_s(by_launcher ? ::getppid() : ::getpid())} {
}

void StartClock::end(double StartTimes::*part) {
  const auto now = std::chrono::steady_clock::now();
  times_.*part = std::chrono::duration<double>(now - begin_).count();
  begin_ = now;
}

}  // namespace flatshard
