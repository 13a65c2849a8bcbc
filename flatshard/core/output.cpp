#include "flatshard/core/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

namespace flatshard {
namespace {

struct Fallback {
  std::mutex mutex;
  std::filesystem::path log;
  std::function<bool()> claim;
  bool moved[3] = {false, false, false};
  bool explained = false;
};

// Never destroyed: threads may print until the process is gone.
Fallback& fallback() {
  static auto* const value = new Fallback;
  return *value;
}

bool reader_is_gone(int error) {
  return error == EPIPE || error == EIO || error == ENXIO ||
         error == ECONNRESET || error == EBADF;
}

/// @return 0, or errno; `text` is what is left then.
int write_all(int fd, std::string_view& text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EAGAIN) {
      // Another user of the same pipe or terminal made it non-blocking.
      pollfd watched{fd, POLLOUT, 0};
      ::poll(&watched, 1, -1);
      continue;
    }
    if (n < 0 && errno != EINTR) {
      return errno;
    }
    text.remove_prefix(n < 0 ? 0 : static_cast<std::size_t>(n));
  }
  return 0;
}

/// Makes `fd` the log, or /dev/null where there can be none.
void move_to_log(int fd, int error, Fallback& to) {
  std::error_code ignored;
  int log = -1;
  if (!to.log.empty()) {
    std::filesystem::create_directories(to.log.parent_path(), ignored);
    log =
        ::open(to.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  }
  if (log >= 0 && !std::exchange(to.explained, true) &&
      (!to.claim || to.claim())) {
    const std::string notice = fmt::format(
        "warning: nothing reads standard {} any more ({}); the run continues, "
        "and its output is in this file from here on\n",
        fd == STDOUT_FILENO ? "output" : "error",
        std::strerror(error));
    std::string_view left = notice;
    write_all(log, left);
  }
  const int target = log >= 0 ? log : ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (target == fd) {  // `fd` was closed, and the lowest free descriptor
    ::fcntl(fd, F_SETFD, 0);
    return;
  }
  ::dup2(target, fd);
  ::close(target);
}

}  // namespace

void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF) {
      ::open("/dev/null", O_RDWR);  // uses the lowest free descriptor
    }
  }
}

void keep_output_in(std::filesystem::path log, std::function<bool()> claim) {
  std::signal(SIGPIPE, SIG_IGN);
  Fallback& to = fallback();
  const std::lock_guard lock(to.mutex);
  to.log = std::move(log);
  to.claim = std::move(claim);
}

void write_output(int fd, std::string_view text) noexcept {
  try {
    Fallback& to = fallback();
    const std::lock_guard lock(to.mutex);
    const int error = write_all(fd, text);
    if (!reader_is_gone(error) || std::exchange(to.moved[fd], true)) {
      return;
    }
    move_to_log(fd, error, to);
    write_all(fd, text);
  } catch (...) {
    // A line of the log is not worth a run.
    return;
  }
}

}  // namespace flatshard
