#include "flatshard/train/save_signals.h"

#include <atomic>
#include <csignal>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

std::atomic<bool> save_asked = false;
std::atomic<bool> stop_asked = false;
std::atomic<bool> in_use = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // for the handler

struct sigaction old_usr1;
struct sigaction old_term;

void on_signal(int signal) {
  (signal == SIGTERM ? stop_asked : save_asked) = true;
}

}  // namespace

SaveSignals::SaveSignals() {
  FLATSHARD_CHECK(
      !in_use.exchange(true),
      usage,
      "expected one SaveSignals in a process, got a second one");
  save_asked = false;
  stop_asked = false;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, &old_usr1);
  // The default action is back for the next one.
  action.sa_flags |= SA_RESETHAND;
  ::sigaction(SIGTERM, &action, &old_term);
}

SaveSignals::~SaveSignals() {
  ::sigaction(SIGUSR1, &old_usr1, nullptr);
  ::sigaction(SIGTERM, &old_term, nullptr);
  in_use = false;
}

bool SaveSignals::take_save_request() {
  return save_asked.exchange(false);
}

bool SaveSignals::stop_requested() const {
  return stop_asked;
}

}  // namespace flatshard
