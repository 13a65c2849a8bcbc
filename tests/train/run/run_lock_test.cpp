#include "flatshard/train/run/run_lock.h"

#include "flatshard/core/error.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <optional>

namespace flatshard {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(
    const std::filesystem::path& folder,
    const RunLock::Options& options = {}) {
  try {
    const RunLock lock(folder, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return {};
}

TEST(RunLock, OneAtATime) {
  const TempFolder folder;
  const auto run = folder / "a" / "run";
  {
    const RunLock lock(run);
    EXPECT_TRUE(std::filesystem::exists(run / "run.lock"));
    EXPECT_THAT(
        refusal(run),
        AllOf(
            HasSubstr("another run writes to " + run.string()),
            HasSubstr(fmt::format("process {} on ", ::getpid())),
            HasSubstr("started at 20"),
            HasSubstr("run.output_dir")));
  }
  // It made the folder, and leaves nothing.
  EXPECT_FALSE(std::filesystem::exists(run));
  EXPECT_EQ(refusal(run), "");
}

TEST(RunLock, WaitsForARunThatEnds) {
  const TempFolder folder;
  std::optional<RunLock> first(std::in_place, folder.path());
  std::thread end([&] { first.reset(); });
  EXPECT_EQ(refusal(folder.path(), {.patience = milliseconds(10000)}), "");
  end.join();
}

TEST(RunLock, ADeadProcessHoldsNothing) {
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    new RunLock(folder.path());
    ::_exit(0);  // without a destructor
  }
  ::waitpid(child, nullptr, 0);
  ASSERT_TRUE(std::filesystem::exists(folder / "run.lock"));
  EXPECT_EQ(refusal(folder.path()), "");
}

// A file system whose locks this host does not see.
TEST(RunLock, AnotherHostLivesWhileItTouchesTheFile) {
  const TempFolder folder;
  const RunLock::Options options{
      .touch_every = milliseconds(25),
      .trust_locks = false};
  const std::string other =
      R"({"host":"far","process":7,"started":"2026-01-01T00:00:00Z"})";
  const auto file = folder.write("run.lock", other);
  std::atomic<bool> ended = false;
  std::thread far([&] {
    while (!ended) {
      std::filesystem::last_write_time(
          file,
          std::filesystem::file_time_type::clock::now());
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  EXPECT_THAT(
      refusal(folder.path(), options),
      HasSubstr("process 7 on far, started at 2026-01-01T00:00:00Z"));
  ended = true;
  far.join();
  EXPECT_EQ(refusal(folder.path(), options), "");
}

TEST(RunLock, AFolderThatCannotBe) {
  try {
    const RunLock lock("/proc/none");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_THAT(error.message(), HasSubstr("cannot make /proc/none"));
  }
}

}  // namespace
}  // namespace flatshard
