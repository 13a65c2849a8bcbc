#pragma once

#include <string>

#include "flatshard/launch/fd.h"

namespace flatshard {

/// Passes a rank's standard error, through a pipe, to this process's own.
class RankStderr {
 public:
  /// Serves a rank that writes to this process's own itself.
  RankStderr() = default;
  /// @param read_end  of the pipe; does not block.
  /// @param prefixed  forward complete lines, each with the rank's number.
  RankStderr(int rank, Fd read_end, bool prefixed)
      : rank_(rank), read_end_(std::move(read_end)), prefixed_(prefixed) {}

  /// File descriptor to wait for; -1 once the rank has closed it.
  int fd() const { return read_end_.get(); }

  /// Passes on what there is, and when the rank has closed its end the rest of
  /// a line as well. Does not wait.
  void pass_on();

  /// Returns the newest forwarded message: from the last line that reports an
  /// error, with the indented lines below it, or else the last line. A
  /// library's warnings may come after the error. Empty if there was no
  /// output.
  std::string last_message() const;

 private:
  int rank_ = 0;
  Fd read_end_;
  bool prefixed_ = false;
  std::string line_;  ///< not ended yet
  std::string tail_;  ///< its most recent output
};

}  // namespace flatshard
