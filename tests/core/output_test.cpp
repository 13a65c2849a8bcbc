#include "flatshard/core/output.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "flatshard/core/error.h"
#include "flatshard/core/file_reader.h"
#include "flatshard/core/mapped_file.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Runs `work` in a child whose standard output has no reader.
/// @return its status, as waitpid has it.
int with_gone_reader(const std::function<void()>& work) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  ::close(ends[0]);  // before the child can write
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[1]);
    work();
    ::_exit(0);
  }
  ::close(ends[1]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(Output, ContinuesInTheLogWhenItsReaderIsGone) {
  const TempFolder folder;
  const auto log = folder / "run/output.log";
  EXPECT_EQ(
      with_gone_reader([&] {
        keep_output_in(log);
        write_output(STDOUT_FILENO, "one\n");
        write_output(STDOUT_FILENO, "two\n");
        // Also what does not go through write_output.
        EXPECT_EQ(::write(STDOUT_FILENO, "three\n", 6), 6);
      }),
      0);
  const std::string text = read(log);
  EXPECT_THAT(text, ::testing::EndsWith("\none\ntwo\nthree\n"));
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("nothing reads standard output"),
          HasSubstr("Broken pipe")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
}

TEST(Output, OneProcessExplains) {
  const TempFolder folder;
  const auto log = folder / "output.log";
  with_gone_reader([&] {
    keep_output_in(log, [] { return false; });
    write_output(STDOUT_FILENO, "one\n");
  });
  EXPECT_EQ(read(log), "one\n");
}

TEST(Output, IsDroppedWhereThereCanBeNoLog) {
  EXPECT_EQ(
      with_gone_reader([] {
        keep_output_in("/proc/no/such/folder/output.log");
        write_output(STDOUT_FILENO, "one\n");
        write_output(STDOUT_FILENO, "two\n");
      }),
      0);
  // A disk without room.
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO);
    write_output(STDOUT_FILENO, "one\n");
    ::_exit(7);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(Output, ClosedStreamsTakeNoFile) {
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDIN_FILENO);
    ::close(STDOUT_FILENO);
    open_standard_streams();
    const int fd =
        ::open((folder / "weights").c_str(), O_WRONLY | O_CREAT, 0666);
    write_output(STDOUT_FILENO, "a line of the log\n");
    ::_exit(fd > STDERR_FILENO ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read(folder / "weights"), "");
}

// The log's descriptor is then the lowest free one, so the stream's own.
TEST(Output, AStreamThatWasClosedIsTheLogFromThenOn) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    const TempFolder folder;
    const auto log = folder / "output.log";
    const pid_t child = ::fork();
    if (child == 0) {
      keep_output_in(log);
      ::close(fd);
      write_output(fd, "one\n");
      const int other =
          ::open((folder / "weights").c_str(), O_WRONLY | O_CREAT, 0666);
      write_output(fd, "two\n");
      const bool inherited = ::fcntl(fd, F_GETFD) == 0;
      ::_exit(other != fd && inherited ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_THAT(read(log), ::testing::EndsWith("\none\ntwo\n"));
    EXPECT_EQ(read(folder / "weights"), "");
  }
}

TEST(Placeholder, AGitLfsPointerIsNamed) {
  const TempFolder folder;
  const auto path = folder.write(
      "model.safetensors",
      "version https://git-lfs.github.com/spec/v1\n"
      "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e"
      "2393\nsize 12345\n");
  const std::function<void()> readers[] = {
      [&] { MappedFile{path}; },
      [&] { FileReader{path}; }};
  for (const auto& open : readers) {
    try {
      open();
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_THAT(
          error.message(),
          AllOf(
              HasSubstr(path.string()),
              HasSubstr("Git LFS pointer"),
              HasSubstr("git lfs pull")));
    }
  }
  EXPECT_EQ(MappedFile(folder.write("a", "version")).text(), "version");
  EXPECT_EQ(FileReader(folder.write("b", "")).nbytes(), 0);
}

}  // namespace
}  // namespace flatshard
