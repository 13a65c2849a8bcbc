#include "flatshard/core/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace flatshard {
namespace {

// From before it exists until after it is gone.
TEST(Process, IsFollowedThroughItsLife) {
  const ProcessStat own = process_stat(::getpid());
  EXPECT_EQ(own.state, 'R');
  EXPECT_GT(own.start_ticks, 0);

  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // should this test fail
    ::pause();
    ::_exit(0);
  }
  EXPECT_GE(process_stat(child).start_ticks, own.start_ticks);
  ::kill(child, SIGSTOP);
  ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  EXPECT_EQ(process_stat(child).state, 'T');
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitid(P_PID, child, nullptr, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(process_stat(child).state, 'Z');
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(process_stat(child).state, 0);
  EXPECT_EQ(process_stat(child).start_ticks, 0);
}

}  // namespace
}  // namespace flatshard
