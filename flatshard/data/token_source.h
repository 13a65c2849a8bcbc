#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/data/corpus.h"
#include "flatshard/data/corpus_identity.h"
#include "flatshard/data/packing/packing.h"

namespace flatshard::data {

/// If TokenSource::tokens_are_bytes, larger token ids are not bytes of text.
inline constexpr std::int64_t kNumBytes = 256;

/// A target that the loss ignores.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// The documents of some sequences, one sequence after the other.
struct DocumentLengths {
  /// Length of each document. The sum over a sequence is seq_len: padding
  /// counts as a document.
  std::vector<std::int64_t> lengths;
  /// Number of padding tokens at the end of each sequence.
  std::vector<std::int64_t> padding;

  bool operator==(const DocumentLengths&) const = default;
};

/// The memory that one sequence is read into.
struct Sequence {
  std::span<std::int64_t> tokens;  ///< [seq_len]
  /// [seq_len]: target j is the token after token j, or kIgnoredTarget.
  std::span<std::int64_t> targets;
  DocumentLengths* documents = nullptr;  ///< if not null: appended
};

/// Numbered sequences of tokens. Implementations are immutable and safe to
/// read from several threads.
class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// Returns how many sequences of seq_len tokens and targets there are.
  virtual std::int64_t num_sequences(std::int64_t seq_len) const = 0;
  /// Reads sequence `index`.
  virtual void read(std::int64_t index, const Sequence& out) const = 0;
  /// Returns the runs of tokens of a split that make sequence `index`, in its
  /// order and without its padding. Empty where tokens are of no split.
  virtual std::vector<Piece> pieces(
      std::int64_t /*index*/,
      std::int64_t /*seq_len*/) const {
    return {};
  }
  /// Returns a number above every token.
  virtual std::int64_t vocab_size() const = 0;
  /// Returns the tokens' origin, for messages.
  virtual std::string describe() const = 0;
  /// Returns whether each token below kNumBytes is a byte of text.
  virtual bool tokens_are_bytes() const { return false; }
  /// Returns a value that identifies its tokens; empty if they are generated on
  /// the fly. May read 16 MiB.
  virtual CorpusIdentity identity() const { return {}; }
  /// Returns whether targets may be kIgnoredTarget.
  virtual bool ignores_targets() const { return false; }
  /// Returns how many sequences have only ignored targets. Reads the mask of
  /// the split, if there is one.
  virtual std::int64_t num_untrained(std::int64_t /*seq_len*/) const {
    return 0;
  }
  /// Returns how documents fill the sequences; unset if sequences are slices of
  /// a token stream.
  virtual std::optional<PackingReport> packing() const { return std::nullopt; }
};

/// Reads the tokens [first, first + out.tokens.size()] of a split. All but the
/// last are out's tokens, all but the first its targets. Targets that the mask
/// leaves out are kIgnoredTarget.
void read_run(const Corpus& corpus, std::int64_t first, const Sequence& out);

/// Returns whether `read_run` of these tokens has a target that is trained.
bool has_trained_target(const Corpus& corpus, const Piece& run);

/// The token stream of a dataset split, divided into sequences: documents
/// follow one another with their end-of-document token between them, and
/// sequence i is tokens [i * seq_len, (i + 1) * seq_len]. Adjacent sequences
/// share one token: the last target of one is the first input of the next. The
/// remainder that does not fill a sequence is dropped.
class CorpusSource : public TokenSource {
 public:
  explicit CorpusSource(std::shared_ptr<const Corpus> corpus);

  std::int64_t num_sequences(std::int64_t seq_len) const override;
  void read(std::int64_t index, const Sequence& out) const override;
  std::vector<Piece> pieces(std::int64_t index, std::int64_t seq_len)
      const override {
    return {{.first = index * seq_len, .length = seq_len}};
  }
  std::int64_t vocab_size() const override;
  std::string describe() const override;
  bool tokens_are_bytes() const override;
  CorpusIdentity identity() const override { return identify(*corpus_); }
  bool ignores_targets() const override { return corpus_->has_mask(); }
  std::int64_t num_untrained(std::int64_t seq_len) const override;

 private:
  std::shared_ptr<const Corpus> corpus_;
};

/// Uniform random tokens for benchmarks. Sequence i depends only on (seed,
/// i).
class RandomTokens : public TokenSource {
 public:
  RandomTokens(std::uint64_t seed, std::int64_t vocab_size);

  std::int64_t num_sequences(std::int64_t seq_len) const override;
  void read(std::int64_t index, const Sequence& out) const override;
  std::int64_t vocab_size() const override { return vocab_size_; }
  std::string describe() const override { return "random tokens"; }

 private:
  std::uint64_t key_;
  std::int64_t vocab_size_;
};

/// One of the sources that `[data] train = ...` names.
struct SourceChoice {
  std::string path;  ///< a dataset folder, or "random"
  double weight = 1;

  bool is_random() const { return path == "random"; }
  bool operator==(const SourceChoice&) const = default;
};

struct WeightedSource {
  std::shared_ptr<const TokenSource> source;
  double weight = 1;
};

/// Opens the split of each dataset.
///
/// @param vocab_size  of the model; the range of random tokens.
/// @throws Error{config} for an empty list, for datasets with different
/// tokenizers, or for random tokens with Packing::documents; what
/// `Corpus::open` throws.
std::vector<WeightedSource> open_token_sources(
    const std::vector<SourceChoice>& choices,
    const std::string& split,
    std::uint64_t seed,
    std::int64_t vocab_size,
    const PackingOptions& packing = {});

}  // namespace flatshard::data
