#pragma once

#include <chrono>
#include <optional>

namespace flatshard {

/// While it exists, SIGUSR1 asks this process to save a checkpoint. The first
/// SIGINT (Ctrl-C), SIGTERM or SIGHUP (the terminal closed) asks it to stop in
/// order. A second SIGINT or SIGTERM ends the process at once. SIGHUP never
/// does: a terminal that closes may send several. In a rank that
/// spawn_local_ranks started, only the launcher's second signal ends it.
///
/// A signal that the parent process had ignored (nohup; `&` in a script) stays
/// ignored. At most one at a time.
class SaveSignals {
 public:
  SaveSignals();
  /// The actions that were there before.
  ~SaveSignals();
  SaveSignals(const SaveSignals&) = delete;
  SaveSignals& operator=(const SaveSignals&) = delete;

  /// Returns when SIGUSR1 came, if it came since the last call; the last one
  /// of several.
  std::optional<std::chrono::steady_clock::time_point> take_save_request();
  /// SIGINT, SIGTERM or SIGHUP, the one that came first; 0: none.
  int stop_signal() const;
};

/// "SIGTERM" and so on, of the three that stop a run.
const char* stop_signal_name(int signal);

}  // namespace flatshard
