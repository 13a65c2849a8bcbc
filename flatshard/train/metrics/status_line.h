#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace flatshard {

/// The line at the bottom of a terminal: bar, share done, loss, speed,
/// time left. /// Does nothing when `stream` is not a terminal.
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
  /// The line compares the speed with a step of so many seconds, which
  /// `flatshard plan` has for this run.
  void set_planned_step(double seconds) { planned_step_s_ = seconds; }
  /// Takes the line away, so that a log line can be written in its place.
  void clear();

  /// The text of `update` for a terminal of `width` columns.
  /// @param planned_step_s  of a step; 0: there is no plan.
  static std::string render(
      std::int64_t done,
      std::int64_t total,
      double loss,
      double elapsed_s,
      std::int64_t first,
      int width,
      double planned_step_s = 0);

 private:
  std::FILE* stream_;
  bool enabled_;
  bool shown_ = false;
  double planned_step_s_ = 0;
};

}  // namespace flatshard
