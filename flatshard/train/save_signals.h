#pragma once

namespace flatshard {

/// While it lives, SIGUSR1 asks this process to save a checkpoint, and the
/// first SIGINT (Ctrl-C) or SIGTERM asks it to stop in order. The next one of
/// the two ends the process at once. At most one at a time.
class SaveSignals {
 public:
  SaveSignals();
  /// The actions that were there before.
  ~SaveSignals();
  SaveSignals(const SaveSignals&) = delete;
  SaveSignals& operator=(const SaveSignals&) = delete;

  /// SIGUSR1 came since the last call.
  bool take_save_request();
  /// SIGINT or SIGTERM, the one that came first; 0: neither.
  int stop_signal() const;
};

}  // namespace flatshard
