#include "flatshard/train/save_signals.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// One request that comes twice: `timeout` signals the process and its group.
constexpr std::int64_t kSameRequestNs = 100'000'000;

std::atomic<bool> save_asked = false;
std::atomic<int> stop_asked = 0;
std::atomic<std::int64_t> stop_asked_ns = 0;
std::atomic<bool> in_use = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // for the handler
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

struct sigaction old_usr1;
struct sigaction old_term;
struct sigaction old_int;

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void on_save(int) {
  save_asked = true;
}

void on_stop_signal(int signal) {
  int none = 0;
  if (stop_asked.compare_exchange_strong(none, signal)) {
    stop_asked_ns = now_ns();
    return;
  }
  if (now_ns() - stop_asked_ns > kSameRequestNs) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // arrives when this handler has ended
  }
}

}  // namespace

SaveSignals::SaveSignals() {
  FLATSHARD_CHECK(
      !in_use.exchange(true),
      usage,
      "expected one SaveSignals in a process, got a second one");
  save_asked = false;
  stop_asked = 0;
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_save;
  ::sigaction(SIGUSR1, &action, &old_usr1);
  action.sa_handler = on_stop_signal;
  ::sigaction(SIGTERM, &action, &old_term);
  ::sigaction(SIGINT, &action, &old_int);
  // Who started this process in the background of a shell wants it left alone.
  if (old_int.sa_handler == SIG_IGN) {
    ::sigaction(SIGINT, &old_int, nullptr);
  }
}

SaveSignals::~SaveSignals() {
  ::sigaction(SIGUSR1, &old_usr1, nullptr);
  ::sigaction(SIGTERM, &old_term, nullptr);
  ::sigaction(SIGINT, &old_int, nullptr);
  in_use = false;
}

bool SaveSignals::take_save_request() {
  return save_asked.exchange(false);
}

int SaveSignals::stop_signal() const {
  return stop_asked;
}

}  // namespace flatshard
