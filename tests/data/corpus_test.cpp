#include "flatshard/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <numeric>

#include "flatshard/core/process.h"
#include "flatshard/data/corpus_identity.h"
#include "flatshard/data/corpus_writer.h"
#include "tests/data/expect_error.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

class CorpusTypes : public ::testing::TestWithParam<TokenType> {};

TEST_P(CorpusTypes, ReadsAcrossShardsWhatWasWritten) {
  for (const std::int64_t shard_tokens : {1, 3, 7, 100}) {
    const TempFolder temp;
    write_small_corpus(temp / "c", GetParam(), shard_tokens, {5, 0, 8, 1});
    const auto corpus = Corpus::open(temp / "c");
    ASSERT_EQ(corpus->num_tokens(), 14);
    ASSERT_EQ(corpus->num_documents(), 4);
    EXPECT_EQ(corpus->document_begin(1), 5);
    EXPECT_EQ(corpus->document_begin(2), 5);
    EXPECT_EQ(corpus->document_begin(4), 14);
    for (std::int64_t begin = 0; begin <= 14; ++begin) {
      for (std::int64_t end = begin; end <= 14; ++end) {
        std::vector<std::int64_t> expected(
            static_cast<std::size_t>(end - begin));
        std::iota(expected.begin(), expected.end(), begin);
        std::vector<std::int64_t> tokens(expected.size());
        corpus->read(begin, tokens);
        ASSERT_EQ(tokens, expected) << shard_tokens << " " << begin;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Both,
    CorpusTypes,
    ::testing::Values(TokenType::uint16, TokenType::uint32),
    [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Corpus, LargeTokens) {
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint32, 100, {3}, 128253);
  std::vector<std::int64_t> tokens(3);
  Corpus::open(temp / "c")->read(0, tokens);
  EXPECT_EQ(tokens[2], 128255);
}

TEST(Corpus, ReadChecksTheRange) {
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint16, 100, {3});
  const auto corpus = Corpus::open(temp / "c");
  std::vector<std::int64_t> tokens(2);
  EXPECT_THAT(
      error_message(ErrorCode::usage, [&] { corpus->read(2, tokens); }),
      HasSubstr("within [0, 3), got [2, 4)"));
  EXPECT_THAT(
      error_message(ErrorCode::usage, [&] { corpus->read(-1, tokens); }),
      HasSubstr("got [-1, 1)"));
}

TEST(Corpus, MissingThingsAreNamed) {
  const TempFolder temp;
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { Corpus::open(temp / "none"); }),
      ::testing::AllOf(
          HasSubstr("expected a dataset directory"),
          HasSubstr("flatshard data prepare")));
  write_small_corpus(temp / "c", TokenType::uint16, 100, {3});
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] { Corpus::open(temp / "c", "validation"); }),
      HasSubstr("has no split 'validation'"));
}

TEST(Corpus, DamagedFilesAreRefused) {
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint16, 2, {5});
  std::filesystem::resize_file(temp / "c/train-00001.bin", 3);
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { Corpus::open(temp / "c"); }),
      HasSubstr("train-00001.bin: expected 4 bytes as in meta.json, got 3"));
  write_small_corpus(temp / "d", TokenType::uint16, 2, {5});
  std::filesystem::remove(temp / "d/train-00002.bin");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { Corpus::open(temp / "d"); }),
      HasSubstr("cannot open"));
}

TEST(Corpus, AFileCutOffDuringTheRunIsNamed) {
  for (const TokenType type : {TokenType::uint16, TokenType::uint32}) {
    const TempFolder temp;
    write_small_corpus(temp / "c", type, 6000, {9000});
    const auto corpus = Corpus::open(temp / "c");
    const std::int64_t nbytes = 6000 * token_nbytes(type);
    std::filesystem::resize_file(
        temp / "c/train-00000.bin",
        static_cast<std::uintmax_t>(nbytes / 2));
    std::vector<std::int64_t> tokens(300);
    const auto cut_off = ::testing::AllOf(
        HasSubstr((temp / "c/train-00000.bin").string()),
        HasSubstr(
            fmt::format("expected {} bytes, the size when it was", nbytes)),
        HasSubstr(fmt::format("got {};", nbytes / 2)),
        HasSubstr("restore it and restart"));
    for (const std::int64_t begin : {2900, 3000, 5900}) {
      EXPECT_THAT(
          error_message(ErrorCode::io, [&] { corpus->read(begin, tokens); }),
          cut_off)
          << begin;
    }
    // The rest of it, and the next file.
    corpus->read(2700, tokens);
    EXPECT_EQ(tokens.back(), 2999);
    corpus->read(6000, tokens);
    EXPECT_EQ(tokens.front(), 6000);
    std::filesystem::resize_file(temp / "c/train.documents.bin", 0);
    EXPECT_THAT(
        error_message(ErrorCode::io, [&] { corpus->document_begin(0); }),
        HasSubstr("train.documents.bin: expected 16 bytes"));
  }
}

TEST(Corpus, ARemovedOneCanBeReadOn) {
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint16, 4, {9});
  const auto corpus = Corpus::open(temp / "c");
  std::filesystem::remove_all(temp / "c");
  std::vector<std::int64_t> tokens(9);
  corpus->read(0, tokens);
  EXPECT_EQ(tokens.back(), 8);
  EXPECT_EQ(corpus->document_begin(1), 9);
}

bool is_third(std::uint32_t token) {
  return token % 3 == 0;
}

TEST(Corpus, MasksLieBesideTheirShards) {
  const TempFolder temp;
  const CorpusMeta meta = write_small_corpus(
      temp / "c",
      TokenType::uint16,
      4,
      {5, 0, 8},
      0,
      is_third);
  EXPECT_EQ(meta.splits[0].trained_tokens, 5);
  EXPECT_THAT(meta.to_json(), HasSubstr("\"version\": 2"));
  EXPECT_EQ(
      CorpusMeta::from_json(meta.to_json(), "m").to_json(),
      meta.to_json());
  const auto corpus = Corpus::open(temp / "c");
  ASSERT_TRUE(corpus->has_mask());
  for (std::size_t begin = 0; begin < 13; ++begin) {
    std::vector<std::uint8_t> mask(13 - begin);
    corpus->read_mask(static_cast<std::int64_t>(begin), mask);
    for (std::size_t i = 0; i < mask.size(); ++i) {
      ASSERT_EQ(mask[i], (begin + i) % 3 == 0 ? 1 : 0);
    }
  }
  // The same tokens with another mask are other data.
  write_small_corpus(temp / "d", TokenType::uint16, 4, {5, 0, 8});
  EXPECT_FALSE(Corpus::open(temp / "d")->has_mask());
  EXPECT_FALSE(
      identify(*corpus).agrees_with(identify(*Corpus::open(temp / "d"))));
}

TEST(Corpus, BadMasksAreRefused) {
  const TempFolder temp;
  const auto write = [&] {
    write_small_corpus(temp / "c", TokenType::uint16, 4, {5, 8}, 0, is_third);
  };
  write();
  temp.write("c/train-00001.mask.bin", "\1\0\2");
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { Corpus::open(temp / "c"); }),
      HasSubstr("train-00001.mask.bin: expected 4 bytes"));
  temp.write("c/train-00001.mask.bin", std::string("\1\0\2\1", 4));
  const auto corpus = Corpus::open(temp / "c");
  std::vector<std::uint8_t> mask(6);
  corpus->read_mask(0, mask);
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { corpus->read_mask(2, mask); }),
      HasSubstr("train-00001.mask.bin: byte 2: expected 0 or 1, got 2"));
  EXPECT_THAT(
      error_message(ErrorCode::usage, [&] { corpus->read_mask(9, mask); }),
      HasSubstr("within [0, 13), got [9, 15)"));
  std::filesystem::remove(temp / "c/train-00000.mask.bin");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { Corpus::open(temp / "c"); }),
      HasSubstr("train-00000.mask.bin"));
  write();
  CorpusMeta meta = CorpusMeta::load(temp / "c");
  meta.splits[0].trained_tokens = 14;
  temp.write("c/meta.json", meta.to_json());
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { Corpus::open(temp / "c"); }),
      HasSubstr("0 <= trained_tokens <= num_tokens = 13, got 14"));
  SplitWriter writer(temp / "c", "x", TokenType::uint16, 4, /*masked=*/true);
  const std::vector<std::uint32_t> tokens{1, 2};
  EXPECT_THAT(
      error_message(ErrorCode::usage, [&] { writer.append(tokens); }),
      HasSubstr("expected 2 bytes of a mask, got 0"));
}

TEST(CorpusMeta, SurvivesJson) {
  const CorpusMeta meta{
      .token_type = TokenType::uint32,
      .vocab_size = 128256,
      .end_of_document = 128001,
      .tokenizer = "tokenizer.json",
      .input_hash = "abc",
      .splits = {
          {.name = "train",
           .num_tokens = 7,
           .num_documents = 2,
           .shard_tokens = {4, 3}}}};
  const CorpusMeta back = CorpusMeta::from_json(meta.to_json(), "m");
  EXPECT_EQ(back.to_json(), meta.to_json());
  EXPECT_EQ(back.splits[0].shard_file(1), "train-00001.bin");
}

TEST(CorpusMeta, BadJsonIsRefusedByKey) {
  const CorpusMeta good{
      .vocab_size = 10,
      .tokenizer = "bytes",
      .splits = {
          {.name = "train",
           .num_tokens = 7,
           .num_documents = 2,
           .shard_tokens = {4, 3}}}};
  const std::string text = good.to_json();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return error_message(ErrorCode::format, [&] {
      CorpusMeta::from_json(changed, "meta.json");
    });
  };
  EXPECT_THAT(with("{", "["), HasSubstr("expected a JSON object"));
  EXPECT_THAT(
      with("flatshard-corpus", "other"),
      HasSubstr("expected \"format\""));
  EXPECT_THAT(
      with("\"version\": 1", "\"version\": 3"),
      HasSubstr("reads dataset versions 1 and 2, got version 3"));
  EXPECT_THAT(with("uint16", "int8"), HasSubstr("got 'int8'"));
  EXPECT_THAT(
      with("\"vocab_size\": 10", "\"vocab_size\": \"x\""),
      HasSubstr("key 'vocab_size' has the wrong type"));
  EXPECT_THAT(
      with("\"vocab_size\"", "\"other\""),
      HasSubstr("key 'vocab_size' is missing"));
  EXPECT_THAT(
      with("\"vocab_size\": 10", "\"vocab_size\": 0"),
      HasSubstr("0 <= end_of_document < vocab_size"));
  EXPECT_THAT(
      with("        4,", "        5,"),
      HasSubstr("sum to num_tokens = 7, got a sum of 8"));
}

TEST(FileWriter, AFullDiskIsAnErrorThatNamesTheFile) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "no /dev/full here";
  }
  FileWriter writer("/dev/full");
  writer.write("text");
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { writer.close(); }),
      ::testing::AllOf(
          HasSubstr("cannot write /dev/full"),
          HasSubstr("free some space")));
}

/// Returns the number of a process that has ended.
pid_t ended_process() {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(0);
  }
  ::waitpid(pid, nullptr, 0);
  return pid;
}

TEST(StagedFolder, WhatAKilledCallLeftIsRemoved) {
  const TempFolder temp;
  const std::string dead = fmt::format("{}-{}", host_name(), ended_process());
  const std::string alive = fmt::format("{}-{}", host_name(), ::getppid());
  temp.write(".out.tmp-" + dead + "/train-00000.bin", "x");
  temp.write(".out.tmp-" + alive + "/train-00000.bin", "x");
  temp.write(".other.tmp-" + dead + "/train-00000.bin", "x");
  // Killed between the two renames of a replacement.
  temp.write(".out.old-" + dead + "/meta.json", "{}");
  { const StagedFolder folder(temp / "out", true); }
  EXPECT_FALSE(std::filesystem::exists(temp / (".out.tmp-" + dead)));
  EXPECT_FALSE(std::filesystem::exists(temp / (".out.old-" + dead)));
  EXPECT_TRUE(std::filesystem::exists(temp / (".out.tmp-" + alive)));
  EXPECT_TRUE(std::filesystem::exists(temp / (".other.tmp-" + dead)));
  EXPECT_TRUE(std::filesystem::exists(temp / "out/meta.json"));
}

TEST(StagedFolder, NothingAppearsWithoutACommit) {
  const TempFolder temp;
  {
    const StagedFolder staged(temp / "out", false);
    FileWriter(staged.path() / "meta.json").close();
  }
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
  {
    StagedFolder staged(temp / "out/", false);
    FileWriter(staged.path() / "meta.json").close();
    staged.commit();
  }
  EXPECT_TRUE(std::filesystem::exists(temp / "out/meta.json"));
}

TEST(StagedFolder, ReplacesOnlyACorpusAndOnlyByForce) {
  const TempFolder temp;
  temp.write("corpus/meta.json", "old");
  temp.write("corpus/more", "old");
  temp.write("home/thesis.txt", "dear");
  EXPECT_THAT(
      error_message(
          ErrorCode::usage,
          [&] { StagedFolder(temp / "corpus", false); }),
      HasSubstr("exists; give --force"));
  EXPECT_THAT(
      error_message(
          ErrorCode::usage,
          [&] { StagedFolder(temp / "home", true); }),
      HasSubstr("is not a dataset"));
  StagedFolder staged(temp / "corpus", true);
  FileWriter(staged.path() / "meta.json").close();
  EXPECT_TRUE(std::filesystem::exists(temp / "corpus/more"));
  staged.commit();
  EXPECT_FALSE(std::filesystem::exists(temp / "corpus/more"));
  EXPECT_TRUE(std::filesystem::exists(temp / "corpus/meta.json"));
  EXPECT_TRUE(std::filesystem::exists(temp / "home/thesis.txt"));
}

CorpusIdentity identity_of(
    TokenType type,
    std::int64_t shard_tokens,
    const std::vector<std::uint32_t>& lengths,
    std::uint32_t first_token = 0) {
  const TempFolder temp;
  write_small_corpus(temp / "c", type, shard_tokens, lengths, first_token);
  return identify(*Corpus::open(temp / "c"));
}

TEST(CorpusIdentity, IsThatOfTheTokens) {
  const auto one = identity_of(TokenType::uint16, 100, {5, 8});
  EXPECT_EQ(one.sample.size(), 16U);
  EXPECT_EQ(one.all.size(), 16U);
  // However they are stored.
  for (const TokenType type : {TokenType::uint16, TokenType::uint32}) {
    const auto same = identity_of(type, 3, {5, 8});
    EXPECT_EQ(same.sample, one.sample);
    EXPECT_EQ(same.all, one.all);
    EXPECT_TRUE(one.agrees_with(same));
  }
  const auto other = identity_of(TokenType::uint16, 100, {5, 8}, 1);
  EXPECT_NE(other.sample, one.sample);
  EXPECT_NE(other.all, one.all);
  EXPECT_FALSE(one.agrees_with(other));
}

TEST(CorpusIdentity, OldCorporaAndMadeUpTokensAgreeByWhatTheyHave) {
  const CorpusIdentity now{.sample = "1", .all = "2"};
  EXPECT_TRUE(now.agrees_with({.sample = "1"}));
  EXPECT_FALSE(now.agrees_with({.sample = "3"}));
  EXPECT_FALSE(now.agrees_with({.sample = "1", .all = "3"}));
  EXPECT_TRUE(now.agrees_with({}));
}

}  // namespace
}  // namespace flatshard::data
