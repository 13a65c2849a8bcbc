#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace flatshard {

/// The line at the bottom of a terminal: bar, share done, loss, time left.
/// Does nothing when `stream` is not a terminal.
class StatusLine {
 public:
  explicit StatusLine(std::FILE* stream = stderr);
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;
  /// Removes the line.
  ~StatusLine();

  bool enabled() const { return enabled_; }
  /// @param elapsed_s  time for the `done` steps so far of this process.
  /// @param first      steps done before this process began (a resumed run).
  void update(
      std::int64_t done,
      std::int64_t total,
      double loss,
      double elapsed_s,
      std::int64_t first = 0);
  /// Takes the line away, so that a log line can be written in its place.
  void clear();

  /// The text of `update` for a terminal of `width` columns.
  static std::string render(
      std::int64_t done,
      std::int64_t total,
      double loss,
      double elapsed_s,
      std::int64_t first,
      int width);

 private:
  std::FILE* stream_;
  bool enabled_;
  bool shown_ = false;
};

}  // namespace flatshard
