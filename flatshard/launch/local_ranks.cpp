// Uses no torch, because it forks, and torch's threads and locks do not survive
// a fork.
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/launch/fd.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/launch/loopback_listener.h"
#include "flatshard/launch/rank_stderr.h"
#include "flatshard/launch/rank_variables.h"

namespace flatshard {
namespace {

using Clock = std::chrono::steady_clock;

// One request that comes twice: `timeout` signals the process and its group.
constexpr std::chrono::milliseconds kSameRequest(100);

/// Returns whether the parent had the signal ignored (nohup; `&` in a script).
bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGCHLD arrive through a descriptor
// while this exists. The ranks get the old mask back. Signals that the parent
// had ignored stay ignored. The kernel does not drop a blocked signal, so the
// descriptor would deliver it.
class SignalGate {
 public:
  SignalGate() {
    // A parent that ignores it would leave no exit codes to wait for.
    ::signal(SIGCHLD, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD}) {
      if (!is_ignored(signal)) {
        sigaddset(&set, signal);
      }
    }
    checked_call(sigprocmask(SIG_BLOCK, &set, &old_), "sigprocmask");
    fd_ = Fd(checked_call(
        signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK),
        "signalfd"));
  }
  ~SignalGate() { sigprocmask(SIG_SETMASK, &old_, nullptr); }
  int fd() const { return fd_.get(); }
  /// SIGUSR1 stays blocked: until the rank has a handler it must not end it.
  sigset_t ranks_mask() const {
    sigset_t mask = old_;
    sigaddset(&mask, SIGUSR1);
    return mask;
  }

 private:
  sigset_t old_{};
  Fd fd_;
};

std::atomic<int> launchers_notice_fd = -1;  // in the process that starts ranks

// A pipe with one byte in it: the process that reads the byte is the one that
// writes a message for the entire job.
class Token {
 public:
  Token() {
    int ends[2];
    checked_call(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), "pipe");
    read_ = Fd(ends[0]);
    write_ = Fd(ends[1]);
    checked_call(static_cast<int>(::write(ends[1], "!", 1)), "write");
  }
  int fd() const { return read_.get(); }
  bool take() const {
    char byte = 0;
    return ::read(read_.get(), &byte, 1) == 1;
  }

 private:
  Fd read_;
  Fd write_;
};

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

struct Rank {
  int index = 0;
  pid_t pid = -1;  // -1: it has ended
  RankStderr errors;
};

class LocalRanks {
 public:
  LocalRanks(
      int nproc,
      const std::vector<std::string>& argv,
      std::chrono::milliseconds grace_period)
      : grace_period_(grace_period), ranks_(nproc) {
    launchers_notice_fd = notice_.fd();
    const LoopbackListener listener;
    for (int r = 0; r < nproc; ++r) {
      ranks_[r].index = r;
      start(ranks_[r], argv, listener);
    }
  }

  // Acts only after an exception: no rank may stay.
  ~LocalRanks() {
    launchers_notice_fd = -1;
    send_all(SIGKILL);
    for (Rank& rank : ranks_) {
      if (rank.pid > 0) {
        ::waitpid(rank.pid, nullptr, 0);
      }
    }
  }

  int run() {
    while (num_alive() > 0) {
      wait_for_something();
      read_signals();
      for (Rank& rank : ranks_) {
        rank.errors.pass_on();
      }
      reap();
      if (ending_ && Clock::now() >= deadline_) {
        send_all(SIGKILL);
      }
    }
    for (Rank& rank : ranks_) {
      rank.errors.pass_on();  // output just before the end
    }
    return exit_code_;
  }

  bool signalled() const { return signalled_; }

 private:
  void start(
      Rank& rank,
      const std::vector<std::string>& argv,
      const LoopbackListener& listener) {
    // All memory is allocated before the fork.
    auto variables = rank_variables(
        rank.index,
        static_cast<int>(ranks_.size()),
        listener,
        report_.fd(),
        notice_.fd());
    auto arguments = argv;
    const auto variable_pointers = pointers(variables);
    const auto argument_pointers = pointers(arguments);
    Fd write_end;
    const bool prefixed = rank.index != 0;
    if (prefixed || ::isatty(STDERR_FILENO) == 0) {
      int ends[2];
      checked_call(::pipe2(ends, O_CLOEXEC), "pipe");
      rank.errors = RankStderr(rank.index, Fd(ends[0]), prefixed);
      write_end = Fd(ends[1]);
      checked_call(::fcntl(ends[0], F_SETFL, O_NONBLOCK), "fcntl");
    }
    const sigset_t mask = gate_.ranks_mask();
    const pid_t parent = ::getpid();
    rank.pid = checked_call(::fork(), "fork");
    if (rank.pid != 0) {
      return;
    }
    // In the child: only async-signal-safe calls.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) {
      ::_exit(1);  // the parent died before prctl
    }
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    if (write_end.get() >= 0) {
      ::dup2(write_end.get(), STDERR_FILENO);
    }
    ::fcntl(report_.fd(), F_SETFD, 0);  // survives exec
    ::fcntl(notice_.fd(), F_SETFD, 0);
    if (rank.index == 0) {
      ::fcntl(listener.fd(), F_SETFD, 0);
    }
    ::execve(
        "/proc/self/exe",
        argument_pointers.data(),
        variable_pointers.data());
    ::_exit(127);
  }

  int num_alive() const {
    return static_cast<int>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) {
          return r.pid > 0;
        }));
  }

  void send_all(int signal) {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) {
        ::kill(rank.pid, signal);
      }
    }
  }

  void end_all() {
    if (!ending_) {
      ending_ = true;
      deadline_ = Clock::now() + grace_period_;
      send_all(SIGTERM);
    }
  }

  void wait_for_something() {
    std::vector<pollfd> watched{{gate_.fd(), POLLIN, 0}};
    for (const Rank& rank : ranks_) {
      if (rank.errors.fd() >= 0) {
        watched.push_back({rank.errors.fd(), POLLIN, 0});
      }
    }
    int timeout_ms = -1;
    if (ending_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline_ - Clock::now());
      // After SIGKILL the end of a rank comes as a signal.
      timeout_ms =
          std::clamp<int>(static_cast<int>(left.count()) + 1, 10, 1000);
    }
    ::poll(watched.data(), watched.size(), timeout_ms);
  }

  void read_signals() {
    signalfd_siginfo info;
    while (::read(gate_.fd(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) {
        continue;
      }
      if (signal == SIGUSR1) {
        send_all(signal);  // asks for a checkpoint, ends no rank
        continue;
      }
      if (exit_code_ == 0) {
        exit_code_ = 128 + signal;
      }
      // Also if the terminal or process group already delivered it to the
      // ranks: they act only on the signal that comes from this process.
      const bool first = !std::exchange(signalled_, true);
      // A terminal that closes may send several.
      const bool counts = signal != SIGHUP;
      if (first || (counts && !asked_at_)) {
        send_all(signal);
      }
      if (counts && asked_at_ && Clock::now() - *asked_at_ > kSameRequest) {
        end_all();  // asked twice
      } else if (counts && !asked_at_) {
        asked_at_ = Clock::now();
      }
    }
  }

  void reap() {
    for (Rank& rank : ranks_) {
      int status = 0;
      if (rank.pid <= 0 || ::waitpid(rank.pid, &status, WNOHANG) != rank.pid) {
        continue;
      }
      rank.pid = -1;
      const bool killed = WIFSIGNALED(status);
      const int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code == 0 || ending_) {
        continue;
      }
      // It ended in order, as it was asked to. The others do the same.
      if (signalled_ && !killed && code > 128) {
        continue;
      }
      if (!signalled_) {
        exit_code_ = code;
        rank.errors.pass_on();
        // A rank that was killed could not report why, but others may have.
        if (report_.take() || killed) {
          report(rank, killed ? WTERMSIG(status) : 0, code);
        }
      }
      end_all();
    }
  }

  void report(const Rank& rank, int signal, int code) const {
    const std::string how = signal != 0
                                ? fmt::format(
                                      "was ended by signal {} ({})",
                                      signal,
                                      ::strsignal(signal))
                                : fmt::format("ended with exit code {}", code);
    const std::string message = rank.errors.last_message();
    log_error(
        "rank {} of {} {}; ending the other ranks{}",
        rank.index,
        ranks_.size(),
        how,
        message.empty() ? "" : "; its last message: " + message);
  }

  std::chrono::milliseconds grace_period_;
  SignalGate gate_;
  Token report_;
  Token notice_;
  std::vector<Rank> ranks_;
  bool ending_ = false;
  bool signalled_ = false;
  std::optional<Clock::time_point> asked_at_;  // by the first SIGINT or SIGTERM
  Clock::time_point deadline_;
  int exit_code_ = 0;
};

}  // namespace

bool launched_by_this_program() {
  return std::getenv(kReportVariable) != nullptr;
}

bool claim_failure_report(int patience_ms) {
  const char* variable = std::getenv(kReportVariable);
  if (variable == nullptr) {
    return true;
  }
  const int fd = std::atoi(variable);
  const auto deadline = Clock::now() + std::chrono::milliseconds(patience_ms);
  pollfd watched{fd, POLLIN, 0};
  while (Clock::now() < deadline && ::poll(&watched, 1, 0) == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  char byte = 0;
  const ssize_t n = ::read(fd, &byte, 1);
  // Stay silent only if the pipe is empty. Any other failure may write.
  return n == 1 || (n < 0 && errno != EAGAIN);
}

bool claim_output_notice() {
  const char* variable = std::getenv(kNoticeVariable);
  const int fd =
      variable != nullptr ? std::atoi(variable) : launchers_notice_fd.load();
  char byte = 0;
  return fd < 0 || ::read(fd, &byte, 1) != -1 || errno != EAGAIN;
}

int spawn_local_ranks(
    int nproc,
    const std::vector<std::string>& argv,
    bool* signalled,
    std::chrono::milliseconds grace_period) {
  FLATSHARD_CHECK(
      nproc >= 1,
      config,
      "expected at least one rank for --nproc, got {}",
      nproc);
  FLATSHARD_CHECK(
      !argv.empty(),
      usage,
      "expected the program's own arguments, got an empty list");
  LocalRanks ranks(nproc, argv, grace_period);
  const int code = ranks.run();
  if (signalled != nullptr) {
    *signalled = ranks.signalled();
  }
  return code;
}

}  // namespace flatshard
