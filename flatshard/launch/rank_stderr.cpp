#include "flatshard/launch/rank_stderr.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "flatshard/core/output.h"

namespace flatshard {
namespace {

constexpr std::size_t kTailBytes = 16384;

}  // namespace

void RankStderr::pass_on() {
  char block[4096];
  while (read_end_.get() >= 0) {
    const ssize_t n = ::read(read_end_.get(), block, sizeof(block));
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0 && errno == EAGAIN) {
      return;
    }
    if (n <= 0) {
      read_end_.close();
      if (!line_.empty()) {
        line_ += '\n';
      }
    } else {
      const std::string_view text(block, static_cast<std::size_t>(n));
      tail_ += text;
      if (tail_.size() > 2 * kTailBytes) {
        tail_.erase(0, tail_.size() - kTailBytes);
      }
      if (!prefixed_) {
        write_output(STDERR_FILENO, text);
        continue;
      }
      line_ += text;
    }
    for (std::size_t end; (end = line_.find('\n')) != std::string::npos;) {
      const std::string_view line = std::string_view(line_).substr(0, end + 1);
      const bool says_it = line.starts_with(fmt::format("[rank {}/", rank_));
      write_output(
          STDERR_FILENO,
          says_it ? std::string(line)
                  : fmt::format("[rank {}] {}", rank_, line));
      line_.erase(0, end + 1);
    }
  }
}

std::string RankStderr::last_message() const {
  std::vector<std::string_view> lines;
  for (std::string_view rest = tail_; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    lines.push_back(rest.substr(0, end));
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  for (std::size_t i = lines.size(); i-- > 0;) {
    const std::size_t at = lines[i].find("error: ");
    if (at == std::string_view::npos || (at != 0 && lines[i][0] != '[')) {
      continue;
    }
    std::string message(lines[i]);
    for (++i; i < lines.size() && lines[i].starts_with("  "); ++i) {
      message += fmt::format("\n{}", lines[i]);
    }
    return message;
  }
  const auto text = std::find_if(lines.rbegin(), lines.rend(), [](auto line) {
    return line.find_first_not_of(" \t") != line.npos;
  });
  return text == lines.rend() ? std::string() : std::string(*text);
}

}  // namespace flatshard
