#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace flatshard {

/// Progress of a run.
struct Progress {
  std::int64_t done = 0;  ///< steps
  std::int64_t total = 0;
  std::int64_t first = 0;      ///< steps completed before this process started
  std::optional<double> loss;  ///< unset: not known yet
  std::int64_t tokens = 0;     ///< seen so far; 0: not shown
  double elapsed_s = 0;        ///< for the steps of this process
  /// The time of a step, by `flatshard plan`; unset: there is no plan.
  std::optional<double> planned_step_s;
};

/// The line at the bottom of a terminal: bar, share done, loss, tokens seen,
/// speed compared with the plan, time left.
/// Does nothing when `stream` is not a terminal.
class StatusLine {
 public:
  explicit StatusLine(std::FILE* stream = stderr);
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;
  /// Removes the line.
  ~StatusLine();

  bool enabled() const { return enabled_; }
  void update(const Progress& progress);
  /// Clears the line, so that a log line can be written in its place.
  void clear();

  /// Returns the text of `update` for a terminal of `width` columns.
  static std::string render(const Progress& progress, int width);

 private:
  std::FILE* stream_;
  bool enabled_;
  bool shown_ = false;
};

}  // namespace flatshard
