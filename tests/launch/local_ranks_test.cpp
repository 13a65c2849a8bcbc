#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/launch/local_ranks.h"
#include "tests/support/temp_folder.h"

extern char** environ;

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

struct Result {
  int exit_code = -1;
  int signal = 0;
  std::string out;
  std::string errors;
};

// The helper program with its output in pipes.
class Helper {
 public:
  Helper(
      int nproc,
      const std::string& mode,
      const std::vector<std::string>& variables = {}) {
    EXPECT_EQ(pipe2(out_, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(errors_, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out_[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, errors_[1], STDERR_FILENO);
    std::vector<std::string> text{LAUNCH_HELPER, std::to_string(nproc), mode};
    std::vector<char*> argv{text[0].data(), text[1].data(), text[2].data(), {}};
    std::vector<std::string> own(variables);
    std::vector<char*> environment;
    for (std::string& variable : own) {
      environment.push_back(variable.data());
    }
    for (char** entry = environ; *entry != nullptr; ++entry) {
      environment.push_back(*entry);
    }
    environment.push_back(nullptr);
    EXPECT_EQ(
        posix_spawn(
            &pid_,
            LAUNCH_HELPER,
            &actions,
            nullptr,
            argv.data(),
            environment.data()),
        0);
    posix_spawn_file_actions_destroy(&actions);
    close(out_[1]);
    close(errors_[1]);
  }
  ~Helper() {
    close(out_[0]);
    close(errors_[0]);
  }

  void send(int signal) const { kill(pid_, signal); }
  pid_t pid() const { return pid_; }
  const std::string& out() const { return result_.out; }

  // Until `count` lines were written to standard output.
  void wait_for_lines(int count) {
    char c = 0;
    while (count > 0 && read(out_[0], &c, 1) == 1) {
      result_.out += c;
      count -= c == '\n';
    }
  }

  // Waits until the program and all writers of its output have exited.
  Result finish() {
    char c = 0;
    while (read(out_[0], &c, 1) == 1) {
      result_.out += c;
    }
    while (read(errors_[0], &c, 1) == 1) {
      result_.errors += c;
    }
    int status = 0;
    waitpid(pid_, &status, 0);
    result_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    result_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return result_;
  }

 private:
  pid_t pid_ = -1;
  int out_[2] = {-1, -1};
  int errors_[2] = {-1, -1};
  Result result_;
};

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(SpawnLocalRanks, AllRanksRunAndTheirOutputComesThrough) {
  const Result result = Helper(3, "ok").finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      sorted_lines(result.out),
      ElementsAre("out 0 of 3", "out 1 of 3", "out 2 of 3"));
  EXPECT_THAT(result.errors, HasSubstr("[rank 1] err 1\n"));
  EXPECT_THAT(result.errors, HasSubstr("[rank 1] no newline 1\n"));
  EXPECT_THAT(result.errors, HasSubstr("[rank 2] err 2\n"));
  EXPECT_THAT(result.errors, HasSubstr("err 0\n"));
  EXPECT_THAT(result.errors, Not(HasSubstr("[rank 0]")));
}

TEST(SpawnLocalRanks, OneRank) {
  const Result result = Helper(1, "ok").finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "out 0 of 1\n");
}

TEST(SpawnLocalRanks, RanksMeetInTheInheritedStore) {
  const Result result = Helper(3, "collective").finish();
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.out, "sum 3\nsum 3\nsum 3\n");
}

TEST(SpawnLocalRanks, OneFailureEndsAllAndNamesTheRank) {
  const Result result = Helper(3, "fail").finish();
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(
      result.errors,
      HasSubstr("rank 1 of 3 ended with exit code 7; ending the other ranks"));
  EXPECT_THAT(result.errors, Not(HasSubstr("rank 0 of")));
  EXPECT_THAT(result.errors, Not(HasSubstr("rank 2 of")));
}

TEST(SpawnLocalRanks, OneRankReports) {
  const Result result = Helper(4, "report").finish();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_EQ(result.out, "reported\n");
  // It has reported its error, so the launcher adds nothing.
  EXPECT_EQ(result.errors, "");
}

TEST(SpawnLocalRanks, AnEchoWaitsForTheCause) {
  const Result result = Helper(2, "patient").finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(
      sorted_lines(result.out),
      (std::vector<std::string>{"rank 0 was silent", "rank 1 reported"}));
}

TEST(ClaimFailureReport, IsAlwaysGrantedWithoutALauncher) {
  EXPECT_TRUE(claim_failure_report());
  EXPECT_TRUE(claim_failure_report());
}

TEST(SpawnLocalRanks, TheLastMessageComesWithTheFailure) {
  const Result result = Helper(2, "message").finish();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(
      result.errors,
      HasSubstr("rank 1 of 2 ended with exit code 5; ending the other ranks; "
                "its last message: [rank 1/2] error: no data left\n"
                "  rank  step\n  1     7\n"));
  EXPECT_THAT(result.errors, HasSubstr("[rank 1] warning: from a library\n"));
  // It prints its rank itself, and once is enough.
  EXPECT_THAT(
      result.errors,
      AllOf(
          HasSubstr("\n[rank 1/2] error: no data left\n"),
          Not(HasSubstr("[rank 1] [rank 1/2]"))));
  // Rank 0 is not prefixed, but still quoted.
  const Result zero = Helper(2, "message0").finish();
  EXPECT_THAT(
      zero.errors,
      HasSubstr("rank 0 of 2 ended with exit code 5; ending the other ranks; "
                "its last message: [rank 1/2] error: no data left"));
  EXPECT_THAT(zero.errors, Not(HasSubstr("[rank 0]")));
  // A crash has no error line: the last one that is not empty.
  const Result crash = Helper(2, "crash").finish();
  EXPECT_EQ(crash.exit_code, 128 + SIGABRT);
  EXPECT_THAT(
      crash.errors,
      AllOf(
          HasSubstr("rank 1 of 2 was ended by signal 6"),
          HasSubstr("its last message: terminate called after throwing\n")));
}

// The possible remains of a run: processes that carry its tag, files in its
// TMPDIR, shared memory, sockets that listen at its port. Other programs may
// bind the port itself as soon as it is free.
class Traces {
 public:
  Traces()
      : tag_(fmt::format("FLATSHARD_TEST_TAG={}", ::getpid())),
        shared_memory_(shared_memory()) {}

  std::vector<std::string> variables() const {
    return {tag_, "TMPDIR=" + folder_.path().string()};
  }

  std::vector<int> processes() const {
    std::vector<int> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      std::ifstream file(entry.path() / "environ");
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      if (text.find(tag_) != std::string::npos) {
        found.push_back(std::stoi(name));
      }
    }
    return found;
  }

  // Call it while the run listens at `port`.
  void note_sockets(int port) {
    for (const auto& [inode, at] : listening()) {
      if (at == port) {
        sockets_.insert(inode);
      }
    }
    EXPECT_FALSE(sockets_.empty()) << port;
  }

  // Ranks that die with a killed launcher do so a moment later.
  void expect_none() const {
    for (int i = 0; i < 2000 && !processes().empty(); ++i) {
      poll(nullptr, 0, 5);
    }
    EXPECT_THAT(processes(), ElementsAre());
    EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
    EXPECT_EQ(shared_memory(), shared_memory_);
    for (const auto& [inode, at] : listening()) {
      EXPECT_FALSE(sockets_.contains(inode)) << at;
    }
  }

 private:
  static std::set<std::string> shared_memory() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      names.insert(entry.path());
    }
    return names;
  }

  // Returns the port of each listening socket of this machine, by its inode.
  static std::map<std::string, int> listening() {
    std::map<std::string, int> found;
    for (const char* name : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      std::ifstream file(name);
      std::string line;
      std::getline(file, line);  // titles
      while (std::getline(file, line)) {
        std::istringstream words(line);
        const std::vector<std::string> word{
            std::istream_iterator<std::string>(words),
            {}};
        if (word.size() > 9 && word[3] == "0A") {  // TCP_LISTEN
          const std::string& address = word[1];
          found[word[9]] =
              std::stoi(address.substr(address.find(':') + 1), nullptr, 16);
        }
      }
    }
    return found;
  }

  TempFolder folder_;
  std::string tag_;
  std::set<std::string> shared_memory_;
  std::set<std::string> sockets_;  ///< inodes
};

TEST(SpawnLocalRanks, NothingStaysBehindHoweverItEnds) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGKILL}) {
    Traces traces;
    Helper helper(3, "forever", traces.variables());
    helper.wait_for_lines(3);
    EXPECT_EQ(traces.processes().size(), 4U);
    traces.note_sockets(std::stoi(helper.out()));
    helper.send(signal);
    const Result result = helper.finish();
    EXPECT_EQ(
        signal == SIGKILL ? result.signal : result.exit_code - 128,
        signal);
    traces.expect_none();
  }
}

TEST(SpawnLocalRanks, NothingStaysBehindWhenARankIsKilled) {
  Traces traces;
  Helper helper(3, "forever", traces.variables());
  helper.wait_for_lines(3);
  traces.note_sockets(std::stoi(helper.out()));
  for (const int pid : traces.processes()) {
    if (pid != helper.pid()) {
      kill(pid, SIGKILL);
      break;
    }
  }
  EXPECT_EQ(helper.finish().exit_code, 128 + SIGKILL);
  traces.expect_none();
}

TEST(SpawnLocalRanks, ASignalIsNamed) {
  const Result result = Helper(2, "signal").finish();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(
      result.errors,
      HasSubstr("rank 1 of 2 was ended by signal 9 (Killed)"));
}

TEST(SpawnLocalRanks, RanksThatIgnoreSigtermAreKilled) {
  const Result result = Helper(2, "stubborn").finish();
  EXPECT_EQ(result.exit_code, 3);
}

TEST(SpawnLocalRanks, SigtermGoesToAllRanks) {
  Helper helper(2, "polite");
  helper.wait_for_lines(2);
  helper.send(SIGTERM);
  const Result result = helper.finish();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_EQ(result.out, "ready\nready\nended\nended\n");
}

TEST(SpawnLocalRanks, ASecondSignalEndsRanksThatDoNotListen) {
  Helper helper(2, "orphan");
  helper.wait_for_lines(2);
  helper.send(SIGINT);  // the ranks have the default action and die
  EXPECT_EQ(helper.finish().exit_code, 128 + SIGINT);
  Helper deaf(2, "orphan");
  deaf.wait_for_lines(2);
  // Within a tenth of a second the second one is the same request.
  deaf.send(SIGTERM);
  poll(nullptr, 0, 150);
  deaf.send(SIGTERM);
  EXPECT_EQ(deaf.finish().signal, 0);
}

// A terminal that closes may send several signals while the ranks still handle
// the first one.
TEST(SpawnLocalRanks, HangingUpTwiceEndsNobody) {
  Helper helper(2, "hung_up");
  helper.wait_for_lines(2);
  helper.send(SIGHUP);
  helper.wait_for_lines(2);
  helper.send(SIGHUP);
  helper.send(SIGUSR1);
  helper.wait_for_lines(2);
  helper.send(SIGTERM);
  const Result result = helper.finish();
  EXPECT_EQ(result.out, "ready\nready\nhup\nhup\nusr1\nusr1\n");
  EXPECT_EQ(result.exit_code, 128 + SIGHUP);
}

// nohup, and `&` in a script.
TEST(SpawnLocalRanks, WhatTheParentIgnoresStaysIgnored) {
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT}) {
    const auto before = std::signal(signal, SIG_IGN);
    Helper helper(2, "hung_up");
    std::signal(signal, before);
    helper.wait_for_lines(2);
    helper.send(signal);
    helper.send(signal);
    helper.send(SIGUSR1);
    helper.wait_for_lines(2);
    helper.send(SIGTERM);
    const Result result = helper.finish();
    EXPECT_EQ(result.out, "ready\nready\nusr1\nusr1\n") << signal;
    EXPECT_EQ(result.exit_code, 128 + SIGTERM) << signal;
  }
}

// Exit codes of ranks are still known.
TEST(SpawnLocalRanks, AParentThatIgnoresTheEndOfChildren) {
  const auto before = std::signal(SIGCHLD, SIG_IGN);
  Helper helper(2, "fail");
  std::signal(SIGCHLD, before);
  EXPECT_EQ(helper.finish().exit_code, 7);
}

TEST(SpawnLocalRanks, RanksDieWithTheirParent) {
  Helper helper(2, "orphan");
  helper.wait_for_lines(2);
  helper.send(SIGKILL);
  // Returns only once no rank has the pipes open.
  EXPECT_EQ(helper.finish().signal, SIGKILL);
}

TEST(SpawnLocalRanks, RefusesByName) {
  try {
    spawn_local_ranks(0, {"program"});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("expected at least one rank for --nproc, got 0"));
  }
  EXPECT_THROW(spawn_local_ranks(1, {}), Error);
}

}  // namespace
}  // namespace flatshard
