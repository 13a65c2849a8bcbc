#pragma once

namespace flatshard {

/// While it lives, SIGUSR1 asks this process to save a checkpoint, and SIGTERM
/// to save one and end. A second SIGTERM ends the process at once. At most one
/// at a time.
class SaveSignals {
 public:
  SaveSignals();
  /// The actions that were there before.
  ~SaveSignals();
  SaveSignals(const SaveSignals&) = delete;
  SaveSignals& operator=(const SaveSignals&) = delete;

  /// SIGUSR1 came since the last call.
  bool take_save_request();
  /// SIGTERM came.
  bool stop_requested() const;
};

}  // namespace flatshard
