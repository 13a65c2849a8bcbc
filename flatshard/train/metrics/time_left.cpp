#include "flatshard/train/metrics/time_left.h"

#include <fmt/format.h>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {

std::string TimeLeft::line(const Progress& progress) {
  constexpr double kInterval = 60;
  if (progress.elapsed_s < last_s_ + kInterval ||
      progress.done <= progress.first || progress.done >= progress.total) {
    return {};
  }
  last_s_ = progress.elapsed_s;
  return fmt::format(
      "step {} of {} ({:.0f}%), {} left",
      with_commas(progress.done),
      with_commas(progress.total),
      100.0 * static_cast<double>(progress.done) /
          static_cast<double>(progress.total),
      format_duration(seconds_left(progress)));
}

double seconds_left(const Progress& progress) {
  const std::int64_t trained = progress.done - progress.first;
  return trained <= 0
             ? 0
             : progress.elapsed_s *
                   static_cast<double>(progress.total - progress.done) /
                   static_cast<double>(trained);
}

}  // namespace flatshard
