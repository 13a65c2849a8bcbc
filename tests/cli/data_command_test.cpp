#include "flatshard/cli/data_command.h"

#include <CLI/CLI.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;

class DataCommand : public ::testing::Test {
 protected:
  DataCommand() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "flatshard-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    std::ofstream(folder_ / "a.txt") << "some text";
    std::ofstream(folder_ / "b.txt") << "more text";
  }
  ~DataCommand() override { std::filesystem::remove_all(folder_); }

  /// Runs the command line and returns what it printed.
  static std::string run(std::vector<std::string> arguments) {
    CLI::App program("flatshard");
    add_data_command(program);
    // CLI11 takes them from the back.
    std::reverse(arguments.begin(), arguments.end());
    ::testing::internal::CaptureStdout();
    try {
      program.parse(std::move(arguments));
    } catch (...) {
      std::fflush(stdout);
      ::testing::internal::GetCapturedStdout();
      throw;
    }
    std::fflush(stdout);
    return ::testing::internal::GetCapturedStdout();
  }

  std::string at(const char* name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

TEST_F(DataCommand, ShowsSamples) {
  run(
      {"data",
       "prepare",
       "--input",
       at("*.txt"),
       "--output",
       at("corpus"),
       "--validation-fraction",
       "0"});
  // In the order of length, and packed; elsewhere than on a terminal.
  EXPECT_EQ(
      run({"data", "show", at("corpus"), "--seq-len", "20"}),
      "sample 0 of 1\n"
      "--- document 1: 10 tokens, 9 of them trained\n"
      "s[[ome text<|endoftext|>]]\n"
      "--- document 2: 10 tokens, 9 of them trained\n"
      "m[[ore text<|endoftext|>]]\n"
      "--- 2 tokens of padding\n");
  EXPECT_THAT(
      run(
          {"data",
           "show",
           at("corpus"),
           "--seq-len",
           "5",
           "--packing",
           "stream",
           "--sample",
           "2"}),
      HasSubstr("sample 2 of 3\n--- document 1: "));
  EXPECT_THROW(
      run({"data", "show", at("corpus"), "--packing", "pages"}),
      CLI::ParseError);
  EXPECT_THROW(run({"data", "show", at("corpus"), "--sample", "9"}), Error);
}

TEST_F(DataCommand, PreparesAndShowsACorpus) {
  const std::string made = run(
      {"data",
       "prepare",
       "--input",
       at("*.txt"),
       "--output",
       at("corpus"),
       "--validation-fraction",
       "0.5"});
  EXPECT_THAT(made, HasSubstr("wrote " + at("corpus")));
  EXPECT_THAT(
      made,
      HasSubstr("files            0 of rows (0 JSON, 0 Parquet), 2 of plain "
                "text, 0 links followed, 0 skipped\n"
                "documents        2, 0 empty ones left out\n"
                "tokens per byte  1.111 (20 tokens, 18 bytes of text)\n"
                "first document   "));
  EXPECT_THAT(made, HasSubstr(" text<|endoftext|>\n"));
  EXPECT_THAT(made, HasSubstr("vocab_size       257"));
  EXPECT_THAT(
      made,
      HasSubstr("train            10 tokens, 1 documents, 1 files"));
  EXPECT_THAT(made, HasSubstr("validation       10 tokens"));
  const std::string shown = run({"data", "info", at("corpus")});
  EXPECT_THAT(made, ::testing::EndsWith(shown));
}

TEST_F(DataCommand, SeveralInputsAndForce) {
  const std::vector<std::string> arguments{
      "data",
      "prepare",
      "-i",
      at("a.txt"),
      at("b.txt"),
      "-o",
      at("corpus"),
      "--tokenizer",
      "bytes"};
  EXPECT_THAT(run(arguments), HasSubstr("1 documents"));
  try {
    run(arguments);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_THAT(error.message(), HasSubstr("give --force to replace it"));
  }
  auto forced = arguments;
  forced.emplace_back("--force");
  EXPECT_THAT(run(forced), HasSubstr("wrote"));
}

TEST_F(DataCommand, InfoFindsDamage) {
  run({"data", "prepare", "-i", at("*.txt"), "-o", at("corpus")});
  std::filesystem::resize_file(folder_ / "corpus/train-00000.bin", 3);
  EXPECT_THROW(run({"data", "info", at("corpus")}), Error);
}

TEST_F(DataCommand, ImportsTokensOfOtherPrograms) {
  std::ofstream(folder_ / "train.bin") << std::string("a\0b\0\1\0", 6);
  const std::string made = run(
      {"data",
       "import",
       "--input",
       at("train.bin"),
       "--output",
       at("corpus"),
       "--tokenizer",
       "none",
       "--vocab-size",
       "99",
       "--end-of-document",
       "1",
       "--validation-fraction",
       "0"});
  EXPECT_THAT(
      made,
      HasSubstr("train.bin: raw uint16, 3 tokens, 1 documents\nwrote "));
  EXPECT_THAT(made, HasSubstr("tokenizer        none"));
  EXPECT_THAT(made, ::testing::EndsWith(run({"data", "info", at("corpus")})));
}

TEST_F(DataCommand, MissingOptionsAreUsageErrors) {
  EXPECT_THROW(run({"data"}), CLI::ParseError);
  EXPECT_THROW(run({"data", "prepare"}), CLI::ParseError);
  EXPECT_THROW(
      run({"data", "prepare", "-i", "x", "-o", "y", "--nothing"}),
      CLI::ParseError);
  EXPECT_THROW(run({"data", "info"}), CLI::ParseError);
}

TEST_F(DataCommand, HelpShowsAnExample) {
  CLI::App program("flatshard");
  add_data_command(program);
  const std::string help =
      program.get_subcommand("data")->get_subcommand("prepare")->help();
  EXPECT_THAT(help, HasSubstr("flatshard data prepare --input"));
  EXPECT_THAT(help, HasSubstr("--validation-fraction"));
}

}  // namespace
}  // namespace flatshard
