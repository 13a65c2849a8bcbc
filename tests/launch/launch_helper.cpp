// A program that launches itself, for launch_local_test.cpp:
// launch_helper NPROC MODE
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <utility>

#include <ATen/Functions.h>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/mesh/mesh.h"

namespace {

volatile std::sig_atomic_t terminated = 0;

[[noreturn]] void wait_for_a_signal() {
  while (true) {
    pause();
  }
}

// One write per line, so that lines of several ranks do not mix.
void say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) {
    std::exit(99);
  }
}

int run_rank(const std::string& mode) {
  const auto environment = flatshard::rank_environment_from_env();
  const int rank = environment.rank;
  if (mode == "ok") {
    say("out " + std::to_string(rank) + " of " +
        std::to_string(environment.world_size));
    std::cerr << "err " << rank << "\nno newline " << rank << std::flush;
  } else if (mode == "fail") {
    if (rank == 1) {
      return 7;
    }
    wait_for_a_signal();
  } else if (mode == "report") {
    // All fail at once, and the one that may report does.
    if (flatshard::claim_failure_report()) {
      say("reported");
    }
    return 5;
  } else if (mode == "patient") {
    // Rank 0 only sees that a peer is gone, while rank 1 has the reason.
    if (rank == 0) {
      const bool mine = flatshard::claim_failure_report(60000);
      say(mine ? "rank 0 reported" : "rank 0 was silent");
      return mine ? 6 : 0;
    }
    say(flatshard::claim_failure_report() ? "rank 1 reported" : "lost");
    return 0;
  } else if (mode == "signal") {
    if (rank == 1) {
      raise(SIGKILL);
    }
    wait_for_a_signal();
  } else if (mode == "message" || mode == "message0") {
    if (rank == (mode == "message" ? 1 : 0)) {
      std::cerr << "error: an older one\n  with a table\n"
                << "[rank 1/2] error: no data left\n  rank  step\n  1     7\n"
                << "warning: from a library\n";
      return 5;
    }
    wait_for_a_signal();
  } else if (mode == "crash") {
    if (rank == 1) {
      std::cerr << "loading\nterminate called after throwing\n\n";
      std::abort();
    }
    wait_for_a_signal();
  } else if (mode == "forever") {
    // Sockets, threads and a store, until somebody ends it.
    const auto store = flatshard::make_tcp_store(environment);
    const auto mesh = flatshard::Mesh::create(
        {{"dp", environment.world_size}},
        rank,
        store,
        at::kCPU);
    for (int round = 0;; ++round) {
      mesh->world().barrier();
      if (round == 3) {
        say(std::to_string(environment.master_port));
      }
    }
  } else if (mode == "stubborn") {
    std::signal(SIGTERM, SIG_IGN);
    if (rank == 1) {
      return 3;
    }
    wait_for_a_signal();
  } else if (mode == "polite") {
    struct sigaction action {};
    action.sa_handler = [](int) { terminated = 1; };
    sigaction(SIGTERM, &action, nullptr);
    sigset_t set;
    sigset_t old;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, &old);
    say("ready");
    while (terminated == 0) {
      sigsuspend(&old);
    }
    say("ended");
  } else if (mode == "hung_up") {
    // Prints which signals come, until SIGTERM.
    static volatile std::sig_atomic_t came[NSIG] = {};
    sigset_t set;
    sigset_t none;
    sigemptyset(&set);
    sigemptyset(&none);
    for (const int signal : {SIGHUP, SIGUSR1, SIGTERM}) {
      struct sigaction action {};
      action.sa_handler = [](int number) { came[number] = 1; };
      struct sigaction before {};
      sigaction(signal, &action, &before);
      if (before.sa_handler == SIG_IGN) {
        sigaction(signal, &before, nullptr);
      }
      sigaddset(&set, signal);
    }
    sigprocmask(SIG_BLOCK, &set, nullptr);
    say("ready");
    while (came[SIGTERM] == 0) {
      sigsuspend(&none);
      for (const auto& [signal, text] :
           {std::pair(SIGHUP, "hup"), std::pair(SIGUSR1, "usr1")}) {
        if (came[signal] != 0) {
          came[signal] = 0;
          say(text);
        }
      }
    }
    return 128 + SIGTERM;
  } else if (mode == "orphan") {
    std::signal(SIGTERM, SIG_IGN);
    say("ready");
    wait_for_a_signal();
  } else if (mode == "collective") {
    const auto store = flatshard::make_tcp_store(environment);
    const auto group = flatshard::make_communicator(
        store,
        rank,
        environment.world_size,
        "world",
        at::kCPU);
    const at::Tensor one = at::ones({1});
    group->all_reduce(one, flatshard::ReduceOp::sum);
    say("sum " + std::to_string(one.item<int>()));
    group->barrier();
  } else {
    return 98;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    return 97;
  }
  if (flatshard::launched_by_environment()) {
    return run_rank(argv[2]);
  }
  return flatshard::spawn_local_ranks(
      std::atoi(argv[1]),
      {argv, argv + argc},
      /*signalled=*/nullptr,
      /*grace_period=*/std::chrono::milliseconds(200));
}
