#include "flatshard/data/packing/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "flatshard/data/loader.h"
#include "flatshard/data/packing/packed_documents.h"
#include "tests/data/expect_error.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PackingOptions packing_of(std::int64_t seq_len, std::int64_t max_documents) {
  return {
      .packing = Packing::documents,
      .seq_len = seq_len,
      .max_documents = max_documents};
}

/// Returns the start offsets of documents with these numbers of tokens.
std::vector<std::int64_t> begins_of(const std::vector<std::int64_t>& tokens) {
  std::vector<std::int64_t> begins{0};
  for (const std::int64_t n : tokens) {
    begins.push_back(begins.back() + n);
  }
  return begins;
}

TEST(PackedWindow, FillsSequencesByBestFit) {
  // 7, 5, 4, 3 and 1 pairs. 5 leaves room for 3, and 7 for 1.
  const PackedWindow packed(
      begins_of({4, 8, 2, 6, 5}),
      packing_of(/*seq_len=*/8, /*max_documents=*/4));
  ASSERT_EQ(packed.num_sequences(), 3);
  EXPECT_THAT(packed.pieces(0), ElementsAre(Piece{4, 7}, Piece{12, 1}));
  EXPECT_THAT(packed.pieces(1), ElementsAre(Piece{14, 5}, Piece{0, 3}));
  EXPECT_THAT(packed.pieces(2), ElementsAre(Piece{20, 4}));
  EXPECT_EQ(packed.num_pairs(), 20);
  EXPECT_EQ(packed.num_cut(), 0);
}

TEST(PackedWindow, CutsDocumentsThatAreLongerThanASequence) {
  // 19 pairs: two full sequences and a rest of 3. The rest shares a sequence
  // with 5 pairs. A document of 8 pairs is not split.
  const PackedWindow packed(begins_of({20, 6, 9}), packing_of(8, 4));
  ASSERT_EQ(packed.num_sequences(), 4);
  EXPECT_THAT(packed.pieces(0), ElementsAre(Piece{0, 8}));
  EXPECT_THAT(packed.pieces(1), ElementsAre(Piece{8, 8}));
  EXPECT_THAT(packed.pieces(2), ElementsAre(Piece{26, 8}));
  EXPECT_THAT(packed.pieces(3), ElementsAre(Piece{20, 5}, Piece{16, 3}));
  EXPECT_EQ(packed.num_cut(), 1);
}

TEST(PackedWindow, ASequenceHoldsSoManyDocuments) {
  const PackedWindow packed(begins_of({2, 2, 2, 2, 2}), packing_of(100, 2));
  ASSERT_EQ(packed.num_sequences(), 3);
  EXPECT_EQ(packed.pieces(0).size(), 2U);
  EXPECT_EQ(packed.pieces(2).size(), 1U);
}

TEST(PackedWindow, DocumentsWithoutATargetAreLeftOut) {
  EXPECT_EQ(
      PackedWindow(begins_of({1, 0, 1}), packing_of(8, 4)).num_sequences(),
      0);
}

/// Lengths with short documents, long ones, and some without a target.
std::vector<std::uint32_t> random_lengths(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> lengths;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t kind = random() % 10;
    lengths.push_back(
        kind == 0  ? random() % 2
        : kind < 9 ? 1 + random() % 40
                   : random() % 300);
  }
  return lengths;
}

TEST(PackedDocuments, TrainEveryPairOfADocumentOnce) {
  // More documents than a window of 2048. Token i of the stream is i, so that
  // a target shows where it comes from.
  const std::vector<std::uint32_t> lengths = random_lengths(5000, 3);
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint32, 1 << 14, lengths);
  constexpr std::int64_t kSeq = 64;
  constexpr std::int64_t kDocuments = 5;
  const PackedDocuments source(
      Corpus::open(temp / "c"),
      packing_of(kSeq, kDocuments));
  std::vector<std::int64_t> begins{0};
  std::vector<bool> is_last;  // of its document
  for (const std::uint32_t n : lengths) {
    begins.push_back(begins.back() + n);
    is_last.resize(static_cast<std::size_t>(begins.back()), false);
    if (n > 0) {
      is_last.back() = true;
    }
  }
  std::vector<int> trained(is_last.size());
  std::int64_t num_padding = 0;
  for (std::int64_t i = 0; i < source.num_sequences(kSeq); ++i) {
    std::vector<std::int64_t> tokens(kSeq);
    std::vector<std::int64_t> targets(kSeq);
    DocumentLengths documents;
    source.read(i, {tokens, targets, &documents});
    const std::vector<std::int64_t>& lengths_of = documents.lengths;
    ASSERT_EQ(documents.padding.size(), 1U);
    const std::vector<Piece> pieces = source.pieces(i, kSeq);
    std::size_t at = 0;
    for (std::size_t d = 0; d < lengths_of.size(); ++d) {
      const auto length = static_cast<std::size_t>(lengths_of[d]);
      ASSERT_GT(length, 0U);
      if (d < pieces.size()) {
        ASSERT_EQ(pieces[d], (Piece{tokens[at], lengths_of[d]}));
      }
      if (targets[at] == kIgnoredTarget) {
        ASSERT_EQ(d + 1, lengths_of.size());
        ASSERT_EQ(documents.padding.front(), lengths_of[d]);
        num_padding += lengths_of[d];
        for (std::size_t j = at; j < at + length; ++j) {
          ASSERT_EQ(targets[j], kIgnoredTarget);
        }
        at += length;
        continue;
      }
      ASSERT_LT(d, static_cast<std::size_t>(kDocuments));
      // One document: tokens that follow each other, up to its end at most.
      for (std::size_t j = at; j < at + length; ++j) {
        ASSERT_EQ(tokens[j], tokens[at] + static_cast<std::int64_t>(j - at));
        ASSERT_EQ(targets[j], tokens[j] + 1);
        ASSERT_FALSE(is_last[static_cast<std::size_t>(tokens[j])]);
        ++trained[static_cast<std::size_t>(targets[j])];
      }
      at += length;
    }
    ASSERT_EQ(at, static_cast<std::size_t>(kSeq));
  }
  for (std::size_t t = 0; t < trained.size(); ++t) {
    const bool begins_document =
        std::ranges::binary_search(begins, static_cast<std::int64_t>(t));
    ASSERT_EQ(trained[t], begins_document ? 0 : 1) << t;
  }
  const PackingReport report = *source.packing();
  EXPECT_EQ(report.num_pairs + num_padding, report.num_sequences * kSeq);
  EXPECT_EQ(report.num_cut, std::ranges::count_if(lengths, [](auto n) {
              return n > kSeq + 1;
            }));
  EXPECT_LT(num_padding * 20, report.num_sequences * kSeq);
  EXPECT_THAT(
      report.describe(),
      ::testing::MatchesRegex("5000 documents \\([0-9]+ of them split\\) in "
                              "[0-9]+ samples, 9[5-9]\\.[0-9] % full"));
}

Loader packed_loader(
    const std::filesystem::path& folder,
    std::int64_t documents_per_sample = 4) {
  return Loader(
      open_token_sources(
          {{.path = folder.string()}},
          "train",
          7,
          1 << 20,
          packing_of(16, documents_per_sample)),
      {.seed = 7,
       .seq_len = 16,
       .global_batch_size = 12,
       .vocab_size = 1 << 20,
       .documents_per_sample = documents_per_sample});
}

struct Step {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> targets;
  DocumentLengths documents;

  friend bool operator==(const Step&, const Step&) = default;
};

Step whole_step(const Loader& loader, int world) {
  Step all;
  for (int rank = 0; rank < world; ++rank) {
    for (std::int64_t m = 0; m < loader.num_microbatches(world, 1); ++m) {
      std::vector<std::int64_t> tokens(16);
      std::vector<std::int64_t> targets(16);
      loader.read(
          {.rank = rank, .world = world, .microbatch = m},
          tokens,
          targets,
          &all.documents);
      all.tokens.insert(all.tokens.end(), tokens.begin(), tokens.end());
      all.targets.insert(all.targets.end(), targets.begin(), targets.end());
    }
  }
  return all;
}

TEST(PackedDocuments, AnyNumberOfRanksSeesTheSameAndResumes) {
  const TempFolder temp;
  write_small_corpus(
      temp / "c",
      TokenType::uint32,
      1 << 14,
      random_lengths(400, 5));
  Loader straight = packed_loader(temp / "c");
  EXPECT_TRUE(straight.ignores_targets());
  for (int i = 0; i < 3; ++i) {
    straight.advance();
  }
  const LoaderState state = straight.state();
  for (const int world : {1, 2, 3, 4}) {
    Loader resumed = packed_loader(temp / "c");
    resumed.restore(state);
    Loader expected = packed_loader(temp / "c");
    expected.restore(state);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(whole_step(resumed, world), whole_step(expected, 1)) << world;
      resumed.advance();
      expected.advance();
    }
  }
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] { packed_loader(temp / "c", 5).restore(state); }),
      ::testing::AllOf(
          HasSubstr("documents_per_sample = 4, got data.packing"),
          HasSubstr("set data.packing and data.documents_per_sample")));
}

TEST(PackedDocuments, MaskedTargetsAreIgnored) {
  const TempFolder temp;
  write_small_corpus(
      temp / "c",
      TokenType::uint16,
      4,
      {6, 7},
      0,
      [](std::uint32_t token) { return token % 2 == 0; });
  constexpr std::int64_t kNone = kIgnoredTarget;
  std::vector<std::int64_t> tokens(12);
  std::vector<std::int64_t> targets(12);
  PackedDocuments(Corpus::open(temp / "c"), packing_of(12, 4))
      .read(0, {tokens, targets});
  // The longer document first, and a place that is left over.
  EXPECT_THAT(
      targets,
      ElementsAre(
          kNone,
          8,
          kNone,
          10,
          kNone,
          12,
          kNone,
          2,
          kNone,
          4,
          kNone,
          kNone));
  const CorpusSource stream(Corpus::open(temp / "c"));
  EXPECT_TRUE(stream.ignores_targets());
  stream.read(0, {tokens, targets});
  EXPECT_THAT(
      targets,
      ElementsAre(
          kNone,
          2,
          kNone,
          4,
          kNone,
          6,
          kNone,
          8,
          kNone,
          10,
          kNone,
          12));
}

TEST(PackedDocuments, NeedDocuments) {
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [] {
            open_token_sources(
                {{.path = "random"}},
                "train",
                1,
                9,
                packing_of(8, 4));
          }),
      HasSubstr("random tokens have no documents"));
  const TempFolder temp;
  write_small_corpus(temp / "c", TokenType::uint16, 100, {1, 1});
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { packed_loader(temp / "c"); }),
      HasSubstr("one sequence needs a document of at least 2 tokens"));
  // A documents file whose numbers do not ascend.
  write_small_corpus(temp / "d", TokenType::uint16, 100, {3, 4});
  const std::vector<std::uint64_t> bad{0, 9, 7};
  temp.write(
      "d/train.documents.bin",
      {reinterpret_cast<const char*>(bad.data()), bad.size() * 8});
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { packed_loader(temp / "d"); }),
      ::testing::AllOf(
          HasSubstr("train.documents.bin: expected the first tokens"),
          HasSubstr("prepare it again")));
}

}  // namespace
}  // namespace flatshard::data
