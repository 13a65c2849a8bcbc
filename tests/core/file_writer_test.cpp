#include "flatshard/core/file_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

class FileWriterTest : public ::testing::Test {
 protected:
  FileWriterTest() { fs::create_directories(folder_); }
  ~FileWriterTest() override { fs::remove_all(folder_); }

  void touch(const std::string& name) const {
    std::ofstream(folder_ / name) << "x";
  }
  bool has(const std::string& name) const { return fs::exists(folder_ / name); }

  fs::path folder_ = fs::temp_directory_path() /
                     fmt::format("flatshard-writer-{}", ::getpid());
};

// Returns the id of a process that is gone.
pid_t dead_process() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  return child;
}

TEST_F(FileWriterTest, TemporariesOfDeadProcessesGo) {
  const std::string dead = fmt::format("a.bin.tmp-{}", dead_process());
  const std::string alive = fmt::format("a.bin.tmp-{}", ::getppid());
  const std::string other = fmt::format("b.bin.tmp-{}", dead_process());
  for (const auto& name :
       {dead,
        alive,
        other,
        std::string("a.bin.tmp-notes"),
        std::string("a.bin.tmp-")}) {
    touch(name);
  }
  const fs::path partial = temporary_beside(folder_ / "a.bin");
  EXPECT_EQ(partial, folder_ / fmt::format("a.bin.tmp-{}", ::getpid()));
  EXPECT_FALSE(has(dead));
  EXPECT_TRUE(has(alive)) << "somebody else writes there";
  EXPECT_TRUE(has(other)) << "of another file";
  EXPECT_TRUE(has("a.bin.tmp-notes"));
  EXPECT_TRUE(has("a.bin.tmp-"));
}

TEST_F(FileWriterTest, AtomicWriteReplacesOrLeaves) {
  const fs::path path = folder_ / "a.txt";
  write_file_atomic(path, "one");
  write_file_atomic(path, "two");
  std::ifstream in(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "two");
  int files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder_)) {
    ++files;
  }
  EXPECT_EQ(files, 1);
}

}  // namespace
}  // namespace flatshard
