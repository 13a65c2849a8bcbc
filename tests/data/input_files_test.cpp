#include "flatshard/data/input_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST_F(InputFiles, LinksToFoldersAreNotFollowed) {
  std::filesystem::create_directory_symlink(temp_.path(), temp_ / "x/loop");
  EXPECT_THAT(names({"**/*.py"}), ElementsAre("b.py", "x/c.py", "x/y/d.py"));
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
