#include "flatshard/data/input_kind.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::string_literals;

class InputKinds : public ::testing::Test {
 protected:
  InputKind kind(
      const std::string& name,
      const std::string& bytes,
      InputFormat format = InputFormat::automatic) {
    return kind_of_file(temp_.write(name, bytes), format).kind;
  }
  std::string problem(const std::string& name, const std::string& bytes) {
    return error_message(ErrorCode::format, [&] { kind(name, bytes); });
  }

  TempFolder temp_;
};

TEST_F(InputKinds, NamesAndContent) {
  for (const char* name :
       {"a.jsonl",
        "a.JSONL",
        "a.ndjson",
        "a.json",
        "a.jsonl.gz",
        "A.Json.ZST"}) {
    EXPECT_EQ(kind(name, "{\"text\": \"a\"}\n"), InputKind::json) << name;
  }
  for (const char* name : {"a.txt", "a.py", "README", "a.md", "a.txt.gz"}) {
    EXPECT_EQ(kind(name, "plain\n"), InputKind::text) << name;
  }
  for (const char* name : {"a.parquet", "a.PARQUET", "0000"}) {
    EXPECT_EQ(kind(name, "PAR1..."), InputKind::parquet) << name;
  }
  EXPECT_EQ(kind("a.txt", "\xff\xfe"s + "a\0b\0"s), InputKind::text);
  EXPECT_EQ(kind("a.jsonl", "\xff\xfe"s + "{\0}\0"s), InputKind::json);
  // A first line that only looks alike.
  EXPECT_EQ(kind("a.txt", "{}\n"), InputKind::text);
  EXPECT_EQ(kind("a.txt", "[1] {\"a\": 2}\n"), InputKind::text);
  EXPECT_EQ(kind("a.py", "{\n  \"a\": 1}\n"), InputKind::text);
  EXPECT_EQ(kind("a.txt", "{\"text\": \"a\"} and so on\n"), InputKind::text);
}

TEST_F(InputKinds, FormatDecides) {
  EXPECT_EQ(kind("a.txt", "{}", InputFormat::json), InputKind::json);
  EXPECT_EQ(kind("a.json", "{}", InputFormat::text), InputKind::text);
  EXPECT_EQ(kind("a.csv", "a,b\n", InputFormat::text), InputKind::text);
  EXPECT_EQ(kind("a.zip", "PK\3\4", InputFormat::bytes), InputKind::bytes);
  EXPECT_EQ(parse_input_format("jsonl"), InputFormat::json);
  EXPECT_THAT(
      error_message(ErrorCode::config, [] { parse_input_format("csv"); }),
      HasSubstr("--format: expected auto, text, json, parquet or bytes, got "
                "'csv'"));
}

TEST_F(InputKinds, WhatCannotBeReadIsAnErrorThatNamesIt) {
  const std::string tar = std::string(257, 'n') + "ustar";
  for (const auto& [name, bytes, what] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"a.txt", "PK\3\4", "zip archive"},
           {"a.txt", tar, "tar archive"},
           {"a.jsonl", "BZh91AY", "bzip2 data"},
           {"a",
            "\xfd"
            "7zXZ\0"s,
            "xz data"},
           {"a.bin", "%PDF-1.4", "a PDF"},
           {"a.csv", "a,b", "a table"},
           {"a.TSV.gz", "a\tb", "a table"},
           {"a.bin", "MMIDIDX\0\0"s, "flatshard data import"},
           {"a.parquet", "abcd", "does not begin as Parquet does"},
           {"a.txt", "a\0b\0c\0d\0"s, "UTF-16 without a byte order mark"},
           {"data", "{\"text\": \"a\"}\n", "may be one document or JSON rows"},
           {"a.txt", "[\n{\"text\": \"a\"}]", "JSON rows"}}) {
    EXPECT_THAT(
        problem(name, bytes),
        AllOf(HasSubstr(name), HasSubstr(what), HasSubstr("--format")));
  }
  EXPECT_THAT(
      problem("a.jsonl", "version https://git-lfs.github.com/spec/v1\n"),
      HasSubstr("got a Git LFS pointer to it; fetch the data with git lfs "
                "pull"));
}

TEST_F(InputKinds, NamesBesideTheData) {
  for (const char* name :
       {"README.md",
        "readme",
        "README_de.md",
        "LICENSE",
        "LICENSE-APACHE",
        "Licence.txt",
        ".gitattributes",
        "dataset_infos.json",
        "a.sha256"}) {
    EXPECT_TRUE(is_beside_data(name)) << name;
  }
  for (const char* name :
       {"a.md",
        "licenses.jsonl",
        "readme.jsonl",
        "notice.json",
        "notices.txt",
        "license-texts.jsonl"}) {
    EXPECT_FALSE(is_beside_data(name)) << name;
  }
}

}  // namespace
}  // namespace flatshard::data
