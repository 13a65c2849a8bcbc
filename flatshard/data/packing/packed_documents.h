#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flatshard/data/corpus.h"
#include "flatshard/data/token_source.h"

namespace flatshard::data {

/// The documents of a dataset split, packed into sequences. Adjacent documents
/// are packed together in windows of 2048. A sequence is packed again each time
/// it is read, so memory contains one number for each window and nothing for
/// each document.
class PackedDocuments : public TokenSource {
 public:
  /// Packs all documents once, to count the sequences.
  /// @throws Error{format} where the split's documents file is damaged.
  PackedDocuments(
      std::shared_ptr<const Corpus> corpus,
      const PackingOptions& options);

  /// @param seq_len  the options' value.
  std::int64_t num_sequences(std::int64_t seq_len) const override;
  void read(std::int64_t index, const Sequence& out) const override;
  std::vector<Piece> pieces(std::int64_t index, std::int64_t seq_len)
      const override;
  std::int64_t vocab_size() const override { return corpus_->vocab_size(); }
  std::string describe() const override;
  bool tokens_are_bytes() const override;
  CorpusIdentity identity() const override { return identify(*corpus_); }
  bool ignores_targets() const override { return true; }
  std::int64_t num_untrained(std::int64_t seq_len) const override;
  std::optional<PackingReport> packing() const override { return report_; }

 private:
  PackedWindow window(std::int64_t number) const;

  std::shared_ptr<const Corpus> corpus_;
  PackingOptions options_;
  /// The first sequence of each window; then the number of sequences.
  std::vector<std::int64_t> first_sequence_{0};
  PackingReport report_;
};

}  // namespace flatshard::data
