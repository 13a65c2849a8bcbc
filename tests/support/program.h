#pragma once

#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace flatshard::testing {

/// How a command ended.
struct ProgramResult {
  int code = -1;
  std::string output;  ///< standard output and error together
};

/// Runs the program (FLATSHARD_PROGRAM) with these arguments in a shell.
inline ProgramResult run_program(
    const std::string& arguments,
    const std::string& streams = "2>&1") {
  const std::string command = fmt::format(
      "'{}' {} {} < /dev/null",
      FLATSHARD_PROGRAM,
      arguments,
      streams);
  std::FILE* pipe = ::popen(command.c_str(), "r");
  ProgramResult result;
  std::array<char, 4096> buffer{};
  while (const auto n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    result.output.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

}  // namespace flatshard::testing
