#include "flatshard/train/run/save_signals.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "flatshard/core/error.h"
#include "flatshard/launch/environment.h"

namespace flatshard {
namespace {

// One request that comes twice: `timeout` signals the process and its group.
constexpr std::int64_t kSameRequestNs = 100'000'000;

std::atomic<std::int64_t> save_asked_ns = 0;  // 0: not
std::atomic<int> stop_asked = 0;
std::atomic<std::int64_t> first_asked_ns = 0;  // by SIGINT or SIGTERM; 0: not
std::atomic<bool> in_use = false;
std::atomic<pid_t> launcher = 0;  // 0: this program did not start the process
static_assert(std::atomic<int>::is_always_lock_free);  // for the handlers
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

constexpr std::array<int, 4> kSignals{SIGUSR1, SIGTERM, SIGINT, SIGHUP};
std::array<struct sigaction, kSignals.size()> old_actions;

// Reads the clock of std::chrono::steady_clock; handlers may not call that.
std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void on_save(int) {
  save_asked_ns = now_ns();
}

void on_stop_signal(int signal, siginfo_t* info, void*) {
  int none = 0;
  stop_asked.compare_exchange_strong(none, signal);
  if (signal == SIGHUP) {
    return;
  }
  // The launcher forwards signals that were sent to the process group, and
  // decides which signal is the second one.
  const bool counts =
      launcher == 0 || (info->si_code <= 0 && info->si_pid == launcher);
  const std::int64_t now = now_ns();
  std::int64_t never = 0;
  if (!counts || first_asked_ns.compare_exchange_strong(never, now)) {
    return;
  }
  if (launcher != 0 || now - first_asked_ns > kSameRequestNs) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // arrives when this handler has ended
  }
}

void set_blocked(int how, int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  ::pthread_sigmask(how, &set, nullptr);
}

}  // namespace

SaveSignals::SaveSignals() {
  FLATSHARD_CHECK(
      !in_use.exchange(true),
      usage,
      "expected one SaveSignals in a process, got a second one");
  save_asked_ns = 0;
  stop_asked = 0;
  first_asked_ns = 0;
  launcher = launched_by_this_program() ? ::getppid() : 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    if (kSignals[i] == SIGUSR1) {
      action.sa_flags = SA_RESTART;
      action.sa_handler = on_save;
    } else {
      action.sa_flags = SA_RESTART | SA_SIGINFO;
      action.sa_sigaction = on_stop_signal;
    }
    ::sigaction(kSignals[i], nullptr, &old_actions[i]);
    if (old_actions[i].sa_handler != SIG_IGN) {
      ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  set_blocked(SIG_UNBLOCK, SIGUSR1);  // see spawn_local_ranks
}

SaveSignals::~SaveSignals() {
  if (launcher != 0) {
    set_blocked(SIG_BLOCK, SIGUSR1);
  }
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &old_actions[i], nullptr);
  }
  in_use = false;
}

std::optional<std::chrono::steady_clock::time_point>
SaveSignals::take_save_request() {
  const std::chrono::nanoseconds asked{save_asked_ns.exchange(0)};
  if (asked.count() == 0) {
    return std::nullopt;
  }
  return std::chrono::steady_clock::time_point(asked);
}

int SaveSignals::stop_signal() const {
  return stop_asked;
}

const char* stop_signal_name(int signal) {
  return signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGHUP";
}

}  // namespace flatshard
