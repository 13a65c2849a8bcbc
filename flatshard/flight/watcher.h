#pragma once

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "flatshard/flight/recorder.h"
#include "flatshard/flight/ring.h"

namespace flatshard::detail {

/// The threads of a FlightRecorder and the state that they share with it.
///
/// The store thread publishes this rank's state and reads the others'. A read
/// from a store whose host is stopped or unreachable never returns, so the
/// guard thread watches the store thread. The abort thread starts with the
/// verdict and aborts the communicators. It may hang, too, and the guard
/// reports that.
class FlightWatcher : public std::enable_shared_from_this<FlightWatcher> {
 public:
  FlightWatcher(
      int rank,
      int world,
      StoreHandle store,
      at::Device device,
      FlightRecorderOptions options);

  /// Waits until all ranks are here, then starts the threads.
  void start();
  /// Leaves, or fails with `failure`, and ends the threads. A thread that is
  /// blocked by the network is detached with the state that it shares.
  void close(const std::optional<std::string>& failure);

  int rank() const { return rank_; }
  at::Device device() const { return device_; }
  FlightRing& ring() { return ring_; }
  const FlightRecorderOptions& options() const { return options_; }
  void add(std::weak_ptr<Communicator> communicator);
  void add_with_abort(std::weak_ptr<std::function<void()>> action);
  void set_step(std::int64_t step) { step_ = step; }
  std::int64_t step() const { return step_; }
  FlightState state(int num_entries);

  bool concluded() const { return concluded_; }
  std::optional<Verdict> verdict() const;
  /// Returns the verdict, once the communicators are aborted: until then the
  /// abort thread uses them, and the program should not end during an abort.
  /// Waits at most `abort_patience_` for an abort that hangs.
  std::optional<Verdict> final_verdict();
  /// Publishes `verdict` unless there is one already; returns the one that
  /// all ranks read.
  Verdict propose(Verdict verdict);
  /// Reports that a collective threw, and waits for the ranks' verdict.
  std::optional<Verdict> await_verdict(const std::string& trouble);
  Verdict failure(const std::string& message);

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  /// Entries that are published all the time, per communicator.
  static constexpr int kNumEntries = 4;

  // Store thread.
  void run_store();
  bool tick();
  void publish();
  void read(int rank);
  void read_all();
  /// Stores the state that a rank published last.
  static void take(RankView& view, FlightState state);
  bool others_wait();
  bool leader_left();
  bool is_missing(int rank);
  void judge();
  bool dumps_are_here();
  bool stalled() const;
  void write_verdict(const Verdict& verdict);
  bool read_verdict();
  void acknowledge();
  void leave();
  void wait_for_tick();
  std::string key(int rank) const;
  /// Wraps every call into the store, so the guard sees one that hangs.
  template <class F>
  auto ask(F&& function) {
    const auto answered = c10::make_scope_exit([&] {
      const std::lock_guard lock(mutex_);
      last_answer_ = Clock::now();
    });
    return function();
  }

  // Guard thread.
  void run_guard();
  void say_stuck(const Verdict& verdict);
  // Abort thread.
  void abort_all();
  Verdict store_verdict(const std::string& what, ErrorCode code);

  void conclude(const Verdict& verdict);

  const int rank_;
  const int world_;
  const at::Device device_;
  const FlightRecorderOptions options_;
  const Milliseconds tick_;
  /// A collective or a silence of this length is a fault: a little less than
  /// the timeout, so that the verdict arrives before it.
  const Milliseconds stalled_after_;
  /// The same when a collective has already failed somewhere.
  const Milliseconds settle_;
  /// Maximum wait of a caller for the communicators to end.
  const Milliseconds abort_patience_;
  StoreHandle store_;
  FlightRing ring_;
  std::atomic<std::int64_t> step_ = 0;
  std::atomic<bool> concluded_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  FlightState self_;  ///< without tracks
  std::optional<Verdict> verdict_;
  std::optional<Verdict> proposal_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  std::vector<std::weak_ptr<std::function<void()>>> with_abort_;
  bool woken_ = false;
  bool closing_ = false;
  bool aborted_ = false;
  bool said_stuck_ = false;
  bool left_behind_ = false;  ///< the guard, with the abort thread
  Clock::time_point verdict_at_;
  bool store_done_ = false;
  bool store_lost_ = false;  ///< the store thread may never return
  bool stop_guard_ = false;
  bool guard_done_ = false;
  Clock::time_point last_answer_ = Clock::now();
  FlightState leader_;  ///< rank 0 as last read, for the guard

  // Used only by the store thread.
  std::vector<RankView> views_;
  std::vector<Clock::time_point> last_beat_;
  std::int64_t dump_request_ = 0;
  std::int64_t num_dumps_ = 0;
  std::optional<Clock::time_point> suspicious_since_;
  std::optional<Clock::time_point> missing_since_;
  bool trouble_ = false;

  std::thread store_thread_;
  std::thread guard_thread_;
  std::thread abort_thread_;  ///< the guard's until it is done
};

}  // namespace flatshard::detail
