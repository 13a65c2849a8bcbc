// The part of FlightWatcher that ends the communicators: when the store does
// not answer, or after a verdict.
#include "flatshard/comm/communicator.h"
#include "flatshard/core/log.h"
#include "flatshard/flight/watcher.h"

namespace flatshard::detail {

void FlightWatcher::run_guard() {
  std::unique_lock lock(mutex_);
  const auto self = shared_from_this();  // an abort may outlive the recorder
  const auto aborts = [&] { return verdict_ && !aborted_ && !said_stuck_; };
  while (!stop_guard_ || aborts()) {
    changed_.wait_for(lock, tick_, [&] {
      return (stop_guard_ && !aborts()) ||
             (verdict_ && !abort_thread_.joinable());
    });
    if (aborts()) {
      if (!abort_thread_.joinable()) {
        abort_thread_ = std::thread([self] { self->abort_all(); });
      } else if (Clock::now() - verdict_at_ >= 2 * abort_patience_) {
        said_stuck_ = true;
        const Verdict verdict = *verdict_;
        lock.unlock();
        say_stuck(verdict);
        lock.lock();
      }
      continue;
    }
    const auto silent =
        std::chrono::duration_cast<Milliseconds>(Clock::now() - last_answer_);
    const auto limit = self_.status == RankStatus::troubled &&
                               silent >= settle_ &&
                               process_state(leader_) != ProcessState::running
                           ? settle_
                           : stalled_after_;
    if (!verdict_ && !store_done_ && !closing_ && silent >= limit) {
      store_lost_ = true;
      lock.unlock();
      conclude(store_verdict(
          fmt::format(
              "has not answered for {:.1f} s",
              static_cast<double>(silent.count()) * 1e-3),
          ErrorCode::timeout));
      lock.lock();
    }
  }
  if (left_behind_ && abort_thread_.joinable()) {
    abort_thread_.detach();
  }
  guard_done_ = true;
  changed_.notify_all();
}

void FlightWatcher::say_stuck(const Verdict& verdict) {
  log_warning(
      "the communicators did not stop within {:.1f} s after the verdict; code "
      "that waits for the GPU may hang",
      std::chrono::duration<double>(2 * abort_patience_).count());
  if (!options_.on_stuck_abort) {
    return;
  }
  try {
    options_.on_stuck_abort(verdict);
  } catch (const std::exception& error) {
    log_error("on_stuck_abort: {}", error.what());
  }
}

void FlightWatcher::abort_all() {
  {
    std::vector<std::shared_ptr<Communicator>> communicators;
    std::vector<std::shared_ptr<std::function<void()>>> actions;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& weak : with_abort_) {
        if (auto action = weak.lock()) {
          actions.push_back(std::move(action));
        }
      }
      for (const auto& weak : communicators_) {
        if (auto communicator = weak.lock()) {
          communicators.push_back(std::move(communicator));
        }
      }
    }
    // These run in parallel with the aborts. Dropping a graph may wait for its
    // replay. An abort ends the replay, then waits for the graph.
    std::vector<std::thread> beside;
    for (const auto& action : actions) {
      beside.emplace_back([&action] {
        try {
          (*action)();
        } catch (const std::exception& error) {
          log_error("while the communicators end: {}", error.what());
        }
      });
    }
    abort_together(communicators);
    for (std::thread& thread : beside) {
      thread.join();
    }
  }  // a waiter for the abort then has the only reference
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
  }
  changed_.notify_all();
}

}  // namespace flatshard::detail
