#include "flatshard/data/token_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "flatshard/data/prepare.h"
#include "tests/data/expect_error.h"
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

TEST(RandomTokens, DependOnSeedAndIndexAlone) {
  const RandomTokens a(1, 1000);
  const RandomTokens b(1, 1000);
  const RandomTokens c(2, 1000);
  std::array<std::int64_t, 33> x{};
  std::array<std::int64_t, 33> y{};
  a.read(7, x);
  b.read(3, y);
  EXPECT_NE(x, y);
  b.read(7, y);
  EXPECT_EQ(x, y);
  c.read(7, y);
  EXPECT_NE(x, y);
}

TEST(RandomTokens, CoverTheVocabularyAndNoMore) {
  const RandomTokens source(3, 7);
  std::vector<std::int64_t> tokens(7000);
  source.read(0, tokens);
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
  std::array<std::int64_t, 9> train{};
  std::array<std::int64_t, 9> validation{};
  open_one("random", "train", 999)->read(0, train);
  open_one("random", "validation", 999)->read(0, validation);
  EXPECT_NE(train, validation);
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [] { open_token_sources({}, "train", 1, 9); }),
      HasSubstr("data.train: expected a corpus folder or \"random\""));
  EXPECT_THAT(
      error_message(
          ErrorCode::io,
          [] { open_one("/no/such/corpus", "train", 9); }),
      HasSubstr("flatshard data prepare --input"));
}

TEST(OpenTokenSource, CorporaOfAMixtureShareATokenizer) {
  const TempFolder temp;
  temp.write("a.txt", "0123456789");
  for (const char* name : {"a", "b", "c"}) {
    prepare_corpus(
        {.inputs = {(temp / "a.txt").string()},
         .output = temp / name,
         .validation_fraction = 0});
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
  temp.write("a.txt", "0123456789");
  prepare_corpus(
      {.inputs = {(temp / "a.txt").string()},
       .output = temp / "corpus",
       .validation_fraction = 0});
  const CorpusSource source(Corpus::open(temp / "corpus"));
  // Ten bytes and the end of the document: 11 tokens, so 10 / 4 sequences.
  EXPECT_EQ(source.num_sequences(4), 2);
  EXPECT_EQ(source.num_sequences(10), 1);
  EXPECT_EQ(source.num_sequences(11), 0);
  std::array<std::int64_t, 5> tokens{};
  source.read(1, tokens);
  EXPECT_EQ(tokens, (std::array<std::int64_t, 5>{'4', '5', '6', '7', '8'}));
}

}  // namespace
}  // namespace flatshard::data
