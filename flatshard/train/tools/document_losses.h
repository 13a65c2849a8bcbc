#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "flatshard/data/corpus.h"
#include "flatshard/data/packing/packing.h"
#include "flatshard/data/text_codec.h"

namespace flatshard {

/// The measurements of one document of a split.
struct DocumentLoss {
  std::int64_t index = 0;   ///< in the split
  std::int64_t tokens = 0;  ///< that contribute to the loss
  double nats = 0;          ///< sum of their losses
  /// The bytes of the text of these tokens in UTF-8; unset: unknown.
  std::optional<std::int64_t> bytes;

  double loss() const { return nats / static_cast<double>(tokens); }
};

/// Adds up the losses of tokens by the documents that they are of.
class DocumentLosses {
 public:
  /// @throws what `Corpus::document_begins` throws.
  explicit DocumentLosses(std::shared_ptr<const data::Corpus> corpus);

  /// Adds a sequence. @param pieces   of the split that it consists of, see
  /// TokenSource::pieces. @param targets  [seq_len]; negative ones are ignored.
  void add(
      const std::vector<data::Piece>& pieces,
      std::span<const float> losses,
      std::span<const std::int64_t> targets);

  /// Counts the bytes of all documents' tokens. A codec of a tokenizer runs
  /// Python once for each four million tokens.
  void count_bytes(const data::TextCodec& codec);

  /// Returns the documents with a token that contributes to the loss, in order.
  std::vector<DocumentLoss> documents() const;

 private:
  /// Tokens `[begin, end)` of a document that contribute to the loss.
  struct Run {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  void add_token(std::int64_t token, double nats);

  std::shared_ptr<const data::Corpus> corpus_;
  std::vector<std::int64_t> begins_;  ///< start of each document; then the end
  std::vector<DocumentLoss> sums_;    ///< one per document
  std::vector<std::vector<Run>> runs_;
  std::size_t last_ = 0;  ///< document of the token that was added last
};

/// Writes a line of JSON for each document: index, tokens, loss (mean, in
/// nats), and bytes where they are known. @throws Error{io}.
void write_document_losses(
    const std::filesystem::path& path,
    const std::vector<DocumentLoss>& documents);

}  // namespace flatshard
