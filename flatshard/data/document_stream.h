#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace flatshard::data {

/// The tokens of a list of documents, one document after the other.
class DocumentStream {
 public:
  virtual ~DocumentStream() = default;

  virtual std::int64_t vocab_size() const = 0;
  virtual std::int64_t end_of_document() const = 0;
  virtual std::optional<std::int64_t> begin_of_document() const {
    return std::nullopt;
  }

  /// Goes to the next document and returns how many tokens it has, without an
  /// end-of-document token. The last document must have been read to its end.
  virtual std::int64_t next_document() = 0;
  /// Fills `out` with the document's next tokens.
  virtual void read(std::span<std::uint32_t> out) = 0;

  /// Returns whether tokens have a mask.
  virtual bool has_mask() const { return false; }
  /// Fills `out` with the mask of the tokens that the last `read` gave: 1 where
  /// the loss of a token is taken.
  virtual void read_mask(std::span<std::uint8_t> /*out*/) {}
  /// Returns the mask of the end-of-document token of the document.
  virtual bool trains_end() const { return true; }
};

}  // namespace flatshard::data
