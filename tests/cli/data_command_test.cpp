#include "flatshard/cli/data_command.h"

#include <CLI/CLI.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "flatshard/core/error.h"
#include "tests/data/small_corpus.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;

class DataCommand : public ::testing::Test {
 protected:
  DataCommand() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "flatshard-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~DataCommand() override { std::filesystem::remove_all(folder_); }

  /// Runs the command line and returns what it printed.
  static std::string run(std::vector<std::string> arguments) {
    CLI::App program("flatshard");
    add_data_command(program);
    // CLI11 parses the arguments from the back.
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
  data::write_byte_corpus(at("corpus"), {"some text", "more text"}, 0);
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

TEST_F(DataCommand, InfoDescribesACorpusAndFindsDamage) {
  data::write_byte_corpus(at("corpus"), {"some text", "more text"}, 0.5);
  EXPECT_EQ(
      run({"data", "info", at("corpus")}),
      "tokenizer        bytes\n"
      "vocab_size       257    (model.vocab_size must be at least this)\n"
      "end of document  token 256\n"
      "stored as        uint16\n"
      "train            10 tokens, 1 documents, 1 files\n"
      "validation       10 tokens, 1 documents, 1 files\n");
  std::filesystem::resize_file(folder_ / "corpus/train-00000.bin", 3);
  EXPECT_THROW(run({"data", "info", at("corpus")}), Error);
}

TEST_F(DataCommand, BecomesPythonWithTheOptionsThatWereGiven) {
  // It ends with 3 when it gets what it expects.
  const auto expects = [&](const std::string& arguments) {
    std::ofstream(folder_ / "python")
        << "#!/bin/sh\nshift\n[ \"$*\" = '" << arguments << "' ] && exit 3\n"
        << "echo \"$*\" >&2\n";
    std::filesystem::permissions(
        folder_ / "python",
        std::filesystem::perms::owner_all);
  };
  expects("prepare --input=a --input=b c --output=o --tokenizer=t "
          "--shard-tokens=9 --force");
  EXPECT_EXIT(
      run(
          {"data",
           "prepare",
           "-t",
           "t",
           "-i",
           "a",
           "b c",
           "--force",
           "--shard-tokens",
           "9",
           "-o",
           "o",
           "--python",
           at("python")}),
      ::testing::ExitedWithCode(3),
      "");
  expects("import_tokens --input=a --validation=v --output=o --tokenizer=none "
          "--vocab-size=7");
  EXPECT_EXIT(
      run(
          {"data",
           "import",
           "-i",
           "a",
           "--validation",
           "v",
           "-o",
           "o",
           "-t",
           "none",
           "--vocab-size",
           "7",
           "--python",
           at("python")}),
      ::testing::ExitedWithCode(3),
      "");
  EXPECT_THROW(
      run({"data", "prepare", "-i", "a", "-o", "o", "--python", "/none/p"}),
      Error);
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
