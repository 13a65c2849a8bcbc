#include "flatshard/train/metrics/status_line.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/metrics/time_left.h"

namespace flatshard {

StatusLine::StatusLine(std::FILE* stream)
    : stream_(stream), enabled_(::isatty(fileno(stream)) == 1) {
}

StatusLine::~StatusLine() {
  clear();
}

void StatusLine::update(const Progress& progress) {
  // A terminal that was closed is none any more.
  enabled_ = enabled_ && ::isatty(fileno(stream_)) == 1;
  if (!enabled_) {
    return;
  }
  winsize size{};
  const int width =
      ::ioctl(fileno(stream_), TIOCGWINSZ, &size) == 0 && size.ws_col > 0
          ? size.ws_col
          : 80;
  const std::string text = render(progress, width);
  std::fputs(("\r\033[K" + text).c_str(), stream_);
  std::fflush(stream_);
  shown_ = true;
}

void StatusLine::clear() {
  if (std::exchange(shown_, false) && ::isatty(fileno(stream_)) == 1) {
    std::fputs("\r\033[K", stream_);
    std::fflush(stream_);
  }
}

std::string StatusLine::render(const Progress& progress, int width) {
  constexpr int kMaxBar = 40;
  const std::int64_t done = progress.done;
  const std::int64_t total = progress.total;
  const double share =
      total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0.0;
  std::string tail = fmt::format(" {:3.0f}%  {}/{}", 100 * share, done, total);
  if (progress.loss) {
    tail += fmt::format("  loss {:.4f}", *progress.loss);
  }
  if (progress.tokens > 0) {
    tail += fmt::format("  {} tokens", format_count(progress.tokens));
  }
  if (done > progress.first && progress.planned_step_s) {
    tail += fmt::format(
        "  {:.0f}% of plan",
        100 * *progress.planned_step_s *
            static_cast<double>(done - progress.first) / progress.elapsed_s);
  }
  if (done > progress.first) {
    tail += fmt::format("  {} left", format_duration(seconds_left(progress)));
  }
  // One column stays free: a full line makes some terminals wrap.
  const int bar = std::min(kMaxBar, width - 3 - static_cast<int>(tail.size()));
  if (bar < 4) {
    return tail.substr(1, static_cast<std::size_t>(std::max(0, width - 1)));
  }
  const auto full = static_cast<std::size_t>(
      std::clamp(std::lround(share * bar), 0L, static_cast<long>(bar)));
  return fmt::format(
      "[{}{}]{}",
      std::string(full, '='),
      std::string(static_cast<std::size_t>(bar) - full, ' '),
      tail);
}

}  // namespace flatshard
