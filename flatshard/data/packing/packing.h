#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flatshard::data {

/// Method of turning a split into sequences.
enum class Packing {
  stream,     ///< one stream of tokens, split without regard to documents
  documents,  ///< sequences are filled with complete documents
};

struct PackingOptions {
  Packing packing = Packing::stream;
  std::int64_t seq_len = 0;
  /// The most documents of one sequence.
  std::int64_t max_documents = 0;
};

/// Returns the default maximum number of documents in a sequence of this length
/// (data.documents_per_sample overrides it).
std::int64_t default_max_documents(std::int64_t seq_len);

/// A part of a document in a sequence, most often all of the document: `length`
/// tokens from token `first` of the split on, and the targets after each.
struct Piece {
  std::int64_t first = 0;
  std::int64_t length = 0;

  bool operator==(const Piece&) const = default;
};

/// Packs a window of documents into sequences. A document of n tokens has n - 1
/// pairs of token and target. A document with seq_len pairs or more is split:
/// it fills complete sequences, and its rest is packed like a short document.
/// Pieces are packed by best fit, the longest first.
class PackedWindow {
 public:
  /// @param begins  the first token of each document, then the end of the last.
  PackedWindow(
      std::span<const std::int64_t> begins,
      const PackingOptions& options);

  std::int64_t num_sequences() const;
  /// Returns the pieces of a sequence, in its order.
  std::vector<Piece> pieces(std::int64_t sequence) const;

  std::int64_t num_cut() const { return num_cut_; }
  std::int64_t num_pairs() const { return num_pairs_; }

 private:
  /// A document that fills one or more complete sequences.
  struct Long {
    std::int64_t first = 0;           ///< its first token
    std::int64_t first_sequence = 0;  ///< that it fills
  };

  void fill(std::vector<Piece> rests, const PackingOptions& options);

  std::int64_t seq_len_;
  std::vector<Long> longs_;
  std::int64_t num_whole_ = 0;  ///< sequences that one document fills
  std::vector<std::vector<Piece>> filled_;
  std::int64_t num_cut_ = 0;
  std::int64_t num_pairs_ = 0;
};

/// Statistics of the packing of a split.
struct PackingReport {
  std::int64_t num_documents = 0;
  std::int64_t num_cut = 0;  ///< documents that are longer than a sequence
  std::int64_t num_sequences = 0;
  std::int64_t num_pairs = 0;  ///< tokens with a target
  std::int64_t seq_len = 0;

  /// "5120 documents (3 of them cut) in 812 samples, 98.7 % full".
  std::string describe() const;
};

}  // namespace flatshard::data
