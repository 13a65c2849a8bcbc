#include "flatshard/launch/rank_variables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <thread>

extern char** environ;

namespace flatshard {

std::vector<std::string> rank_variables(
    int rank,
    int nproc,
    const LoopbackListener& listener,
    int report_fd,
    int notice_fd) {
  std::vector<std::string> result;
  std::vector<std::string> own = {
      fmt::format("RANK={}", rank),
      fmt::format("WORLD_SIZE={}", nproc),
      fmt::format("LOCAL_RANK={}", rank),
      fmt::format("LOCAL_WORLD_SIZE={}", nproc),
      "MASTER_ADDR=127.0.0.1",
      fmt::format("MASTER_PORT={}", listener.port()),
      fmt::format("{}={}", kReportVariable, report_fd),
      fmt::format("{}={}", kNoticeVariable, notice_fd)};
  if (rank == 0) {
    own.push_back(fmt::format("FLATSHARD_MASTER_LISTEN_FD={}", listener.fd()));
  }
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    own.push_back(
        fmt::format("OMP_NUM_THREADS={}", std::max(1, cores / nproc)));
  }
  const std::string_view dropped[] = {
      "FLATSHARD_MASTER_LISTEN_FD=",
      "TORCHELASTIC_USE_AGENT_STORE="};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto same_name = [&](std::string_view other) {
      return text.starts_with(other.substr(0, other.find('=') + 1));
    };
    if (std::none_of(own.begin(), own.end(), same_name) &&
        std::none_of(std::begin(dropped), std::end(dropped), same_name)) {
      result.emplace_back(text);
    }
  }
  result.insert(result.end(), own.begin(), own.end());
  return result;
}

}  // namespace flatshard
