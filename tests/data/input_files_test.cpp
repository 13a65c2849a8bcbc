#include "flatshard/data/input_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class InputFiles : public ::testing::Test {
 protected:
  InputFiles() {
    temp_.write("b.py", "bb");
    temp_.write("a.txt", "a");
    temp_.write("x/c.py", "ccc");
    temp_.write("x/y/d.py", "dddd");
    temp_.write("x/y/e.txt", "");
    temp_.write("x/.hidden/f.py", "f");
    temp_.write(".g.py", "g");
  }

  std::vector<std::string> names(std::vector<std::string> inputs) {
    for (std::string& input : inputs) {
      input = (temp_ / input).string();
    }
    std::vector<std::string> all;
    for (const InputFile& file : find_input_files(inputs).files) {
      all.push_back(file.name);
    }
    return all;
  }

  TempFolder temp_;
};

TEST_F(InputFiles, Globs) {
  EXPECT_THAT(names({"*.py"}), ElementsAre("b.py"));
  EXPECT_THAT(names({"**/*.py"}), ElementsAre("b.py", "x/c.py", "x/y/d.py"));
  EXPECT_THAT(names({"x/**/*.py"}), ElementsAre("c.py", "y/d.py"));
  EXPECT_THAT(names({"x/*/?.py"}), ElementsAre("y/d.py"));
  EXPECT_THAT(names({"**/[cd].*"}), ElementsAre("x/c.py", "x/y/d.py"));
  EXPECT_THAT(names({"x/.*/*.py"}), ElementsAre(".hidden/f.py"));
  EXPECT_THAT(names({"x/**"}), ElementsAre("c.py", "y/d.py", "y/e.txt"));
}

TEST_F(InputFiles, FoldersAndFiles) {
  EXPECT_THAT(
      names({""}),
      ElementsAre("a.txt", "b.py", "x/c.py", "x/y/d.py", "x/y/e.txt"));
  EXPECT_THAT(names({"x/"}), ElementsAre("c.py", "y/d.py", "y/e.txt"));
  EXPECT_THAT(names({".g.py", "a.txt"}), ElementsAre(".g.py", "a.txt"));
}

TEST_F(InputFiles, EachFileOnce) {
  EXPECT_THAT(
      names({"x/c.py", "x/**/*.py", "./x/c.py"}),
      ElementsAre("c.py", "y/d.py"));
}

TEST_F(InputFiles, Sizes) {
  EXPECT_EQ(find_input_files({(temp_ / "x/c.py").string()}).files[0].nbytes, 3);
}

TEST_F(InputFiles, LinksAreFollowedOnce) {
  const TempFolder other;
  other.write("part/h.py", "h");
  other.write("part/i.py", "i");
  std::filesystem::create_directory_symlink(other / "part", temp_ / "x/part");
  std::filesystem::create_directory_symlink(other / "part", temp_ / "x/twice");
  std::filesystem::create_directory_symlink("..", temp_ / "x/loop");
  std::filesystem::create_directory_symlink("..", other / "part/loop");
  std::filesystem::create_directory_symlink("y", temp_ / "x/a-link");
  std::filesystem::create_symlink("c.py", temp_ / "x/a.py");
  for (const char* input : {"x/**/*.py", "x/**", "x"}) {
    const auto found = names({input});
    EXPECT_THAT(
        found,
        ::testing::IsSupersetOf({"c.py", "part/h.py", "part/i.py", "y/d.py"}))
        << input;
    EXPECT_EQ(
        std::ranges::count_if(
            found,
            [](const std::string& name) { return name.ends_with(".py"); }),
        4)
        << input;
  }
  EXPECT_THAT(
      names({"x/*/*.py"}),
      ElementsAre("part/h.py", "part/i.py", "y/d.py"));
  const FoundFiles found = find_input_files({(temp_ / "x").string()});
  EXPECT_EQ(found.num_links, 4);
  std::vector<std::string> loops;
  for (const SkippedFile& file : found.skipped) {
    if (file.reason == "a link to a folder that it is in") {
      loops.push_back(file.name);
    }
  }
  EXPECT_THAT(loops, ElementsAre("loop", "part/loop"));
}

TEST_F(InputFiles, ALinkToNothingIsAnError) {
  std::filesystem::create_symlink("gone.py", temp_ / "x/z.py");
  for (const char* input : {"x", "x/*.py", "**/*.py"}) {
    EXPECT_THAT(
        error_message(ErrorCode::io, [&] { names({input}); }),
        ::testing::AllOf(
            HasSubstr("cannot follow"),
            HasSubstr("x/z.py"),
            HasSubstr("restore what the link names")));
  }
  EXPECT_THAT(names({"x/y/*.py"}), ElementsAre("d.py"));
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { names({"x/z.py"}); }),
      HasSubstr("is a link to nothing"));
}

TEST_F(InputFiles, FilesBesideTheDataAreNamed) {
  temp_.write("x/README.md", "r");
  temp_.write("x/LICENSE", "l");
  temp_.write("x/corpus/meta.json", "{\n  \"format\": \"flatshard-corpus\"\n}");
  const FoundFiles found = find_input_files({(temp_ / "x").string()});
  EXPECT_EQ(found.files.size(), 3U);
  std::vector<std::string> skipped;
  for (const SkippedFile& file : found.skipped) {
    skipped.push_back(file.name + ": " + file.reason);
  }
  EXPECT_THAT(
      skipped,
      ::testing::UnorderedElementsAre(
          ".hidden: hidden",
          "LICENSE: beside the data",
          "README.md: beside the data",
          "corpus: a corpus"));
  // A pattern that names them, and a name.
  EXPECT_THAT(names({"x/*.md"}), ElementsAre("README.md"));
  EXPECT_THAT(names({"x/LICENSE"}), ElementsAre("LICENSE"));
  std::filesystem::create_directories(temp_ / "only");
  temp_.write("only/README.md", "r");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { names({"only"}); }),
      HasSubstr("matches no file with data (README.md is beside the data"));
}

TEST_F(InputFiles, AFileThatChangesIsNoticed) {
  const auto files = find_input_files({(temp_ / "x").string()}).files;
  check_unchanged(files);
  temp_.write("x/c.py", "longer than it was");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { check_unchanged(files); }),
      HasSubstr("x/c.py changed while it was read"));
  std::filesystem::remove(temp_ / "x/c.py");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { check_unchanged(files); }),
      HasSubstr("x/c.py changed while it was read"));
}

TEST_F(InputFiles, NoMatchIsAnErrorThatNamesTheInput) {
  for (const std::string input : {"*.rs", "nothing.txt", "x/*/*.rs"}) {
    EXPECT_THAT(
        error_message(ErrorCode::io, [&] { names({input}); }),
        ::testing::AllOf(HasSubstr(input), HasSubstr("matches no file")));
  }
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { names({"nowhere/*.py"}); }),
      HasSubstr("there is no folder"));
  EXPECT_THAT(
      error_message(ErrorCode::config, [] { find_input_files({}); }),
      HasSubstr("at least one file, folder or glob"));
}

}  // namespace
}  // namespace flatshard::data
