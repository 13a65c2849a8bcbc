#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "flatshard/core/error.h"
#include "flatshard/launch/loopback_listener.h"
#include "tests/support/ranks.h"

namespace flatshard::testing {
namespace {

[[noreturn]] void run_child(
    const RankEnvironment& environment,
    const std::function<void(RankContext&)>& function) {
  int code = 0;
  try {
    RankContext context{
        .rank = environment.rank,
        .world = environment.world_size,
        .store = make_tcp_store(environment, {.timeout = kPeerTimeout}),
        .log = std::make_shared<CollectiveLog>()};
    function(context);
    code = ::testing::Test::HasFailure() ? 2 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", environment.rank, error.what());
    code = 1;
  }
  std::fflush(nullptr);
  ::_exit(code);
}

std::ptrdiff_t num_threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

}  // namespace

std::vector<RankOutcome> rank_process_outcomes(
    int world,
    const std::function<void(RankContext&)>& function,
    std::chrono::seconds timeout) {
  FLATSHARD_CHECK(
      num_threads_of_process() == 1,
      usage,
      "ranks as processes need a test program with one thread; keep them "
      "apart from run_ranks");
  auto listener = std::make_unique<LoopbackListener>();
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = ::fork();
    FLATSHARD_CHECK(child >= 0, io, "fork failed");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (rank != 0) {
        ::close(listener->fd());
      }
      run_child(
          {.rank = rank,
           .world_size = world,
           .local_rank = rank,
           .master_addr = "127.0.0.1",
           .master_port = listener->port(),
           .master_listen_fd = listener->fd()},
          function);
    }
    children.push_back(child);
  }
  listener.reset();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<RankOutcome> outcomes(world);
  std::vector<bool> stopped(world);
  for (std::size_t num_alive = children.size(); num_alive > 0;) {
    for (int rank = 0; rank < world; ++rank) {
      int status = 0;
      if (children[rank] <= 0 ||
          ::waitpid(children[rank], &status, WNOHANG | WUNTRACED) == 0) {
        continue;
      }
      if (WIFSTOPPED(status)) {
        stopped[rank] = true;
        continue;
      }
      children[rank] = -1;
      stopped[rank] = false;
      --num_alive;
      outcomes[rank] = {
          .exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
          .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
    }
    const bool late = std::chrono::steady_clock::now() >= deadline;
    const auto num_stopped = static_cast<std::size_t>(
        std::count(stopped.begin(), stopped.end(), true));
    for (int rank = 0; rank < world; ++rank) {
      if (children[rank] > 0 && (late || num_alive == num_stopped)) {
        ::kill(children[rank], SIGKILL);
      }
    }
    ::poll(nullptr, 0, 5);
  }
  return outcomes;
}

void run_rank_processes(
    int world,
    const std::function<void(RankContext&)>& function) {
  const auto outcomes = rank_process_outcomes(world, function);
  std::string bad;
  for (int rank = 0; rank < world; ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    if (outcome != RankOutcome{}) {
      bad += fmt::format(
          " rank {}: exit code {}, signal {};",
          rank,
          outcome.exit_code,
          outcome.signal);
    }
  }
  FLATSHARD_CHECK(
      bad.empty(),
      comm,
      "of {} rank processes failed:{}",
      world,
      bad);
}

}  // namespace flatshard::testing
