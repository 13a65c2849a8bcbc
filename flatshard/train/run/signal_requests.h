#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "flatshard/mesh/mesh.h"
#include "flatshard/train/run/save_signals.h"

namespace flatshard {

/// The requests of signals to any rank; see SaveSignals.
struct Requests {
  bool save = false;
  int stop_signal = 0;  ///< SIGINT, SIGTERM or SIGHUP; 0: none
};

/// Has all ranks agree on what one of them was asked for by a signal, about
/// once a second. A signal reaches one rank after another, and a look may come
/// between: what asks for a checkpoint within a second after the ranks agreed
/// on one is the same request.
class SignalRequests {
 public:
  /// @param log_freq  steps between two looks, at most.
  SignalRequests(std::shared_ptr<Mesh> mesh, std::int64_t log_freq);

  /// Returns whether the ranks look after this step; the same on all.
  bool due(std::int64_t step) const { return step % freq_ == 0; }

  /// Returns the requests since the last look, the same on all ranks.
  /// Collective; blocks.
  /// @param step_ms  a step's time, by which the next looks are chosen; rank
  ///   0's counts.
  Requests take(double step_ms);

 private:
  bool take_save_request();

  std::shared_ptr<Mesh> mesh_;
  const std::int64_t log_freq_;
  SaveSignals signals_;
  std::int64_t freq_ = 1;
  std::chrono::steady_clock::time_point same_save_until_;
};

}  // namespace flatshard
