#include "flatshard/data/token_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>

#include "tests/data/expect_error.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const TokenSource> open_one(
    const std::string& path,
    const std::string& split,
    std::int64_t vocab_size) {
  return open_token_sources({{.path = path}}, split, 1, vocab_size)[0].source;
}

/// Returns the tokens of a sequence and its last target. The targets are the
/// next tokens.
std::vector<std::int64_t> read_sequence(
    const TokenSource& source,
    std::int64_t index,
    std::size_t seq_len) {
  std::vector<std::int64_t> tokens(seq_len);
  std::vector<std::int64_t> targets(seq_len);
  source.read(index, {tokens, targets});
  tokens.push_back(targets.back());
  EXPECT_TRUE(std::ranges::equal(targets, std::span(tokens).subspan(1)));
  return tokens;
}

TEST(RandomTokens, DependOnSeedAndIndexAlone) {
  const RandomTokens a(1, 1000);
  const RandomTokens b(1, 1000);
  const RandomTokens c(2, 1000);
  const auto x = read_sequence(a, 7, 32);
  EXPECT_NE(read_sequence(b, 3, 32), x);
  EXPECT_EQ(read_sequence(b, 7, 32), x);
  EXPECT_NE(read_sequence(c, 7, 32), x);
}

TEST(RandomTokens, CoverTheVocabularyAndNoMore) {
  const RandomTokens source(3, 7);
  const auto tokens = read_sequence(source, 0, 6999);
  std::array<int, 7> hits{};
  for (const std::int64_t token : tokens) {
    ++hits.at(static_cast<std::size_t>(token));
  }
  for (const int count : hits) {
    EXPECT_NEAR(count, 1000, 150);  // five standard deviations
  }
}

TEST(RandomTokens, NeedsAVocabulary) {
  EXPECT_THAT(
      error_message(ErrorCode::config, [] { RandomTokens(1, 0); }),
      HasSubstr("model.vocab_size in [1, 2^32], got 0"));
}

TEST(OpenTokenSource, ByName) {
  EXPECT_EQ(open_one("random", "train", 9)->vocab_size(), 9);
  EXPECT_NE(
      read_sequence(*open_one("random", "train", 999), 0, 8),
      read_sequence(*open_one("random", "validation", 999), 0, 8));
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [] { open_token_sources({}, "train", 1, 9); }),
      HasSubstr("data.train: set it to a dataset directory or \"random"));
  EXPECT_THAT(
      error_message(
          ErrorCode::io,
          [] { open_one("/no/such/corpus", "train", 9); }),
      HasSubstr("flatshard data prepare --input"));
}

TEST(OpenTokenSource, CorporaOfAMixtureShareATokenizer) {
  const TempFolder temp;
  for (const char* name : {"a", "b", "c"}) {
    write_byte_corpus(temp / name, {"0123456789"}, 0);
  }
  CorpusMeta other = CorpusMeta::load(temp / "c");
  other.vocab_size = 300;
  temp.write("c/meta.json", other.to_json());
  const SourceChoice a{.path = (temp / "a").string(), .weight = 3};
  const SourceChoice b{.path = (temp / "b").string()};
  const SourceChoice c{.path = (temp / "c").string()};
  const auto sources =
      open_token_sources({{.path = "random"}, a, b}, "train", 1, 257);
  ASSERT_EQ(sources.size(), 3U);
  EXPECT_EQ(sources[1].weight, 3);
  EXPECT_TRUE(sources[1].source->tokens_are_bytes());
  EXPECT_FALSE(sources[0].source->tokens_are_bytes());
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            open_token_sources({a, b, c}, "train", 1, 300);
          }),
      ::testing::AllOf(
          HasSubstr(a.path),
          HasSubstr(c.path),
          HasSubstr("different tokenizers"),
          HasSubstr("257 and 300")));
}

TEST(CorpusSource, SequencesOverlapByOneToken) {
  const TempFolder temp;
  write_byte_corpus(temp / "corpus", {"0123456789"}, 0);
  const CorpusSource source(Corpus::open(temp / "corpus"));
  // Ten bytes and the end of the document: 11 tokens, so 10 / 4 sequences.
  EXPECT_EQ(source.num_sequences(4), 2);
  EXPECT_EQ(source.num_sequences(10), 1);
  EXPECT_EQ(source.num_sequences(11), 0);
  EXPECT_EQ(
      read_sequence(source, 1, 4),
      (std::vector<std::int64_t>{'4', '5', '6', '7', '8'}));
}

}  // namespace
}  // namespace flatshard::data
