#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/document_stream.h"
#include "flatshard/data/text_documents.h"

namespace flatshard::data {

/// The documents of files: each byte is one token.
class ByteDocuments : public DocumentStream {
 public:
  /// @param files  must outlive this.
  ByteDocuments(const std::vector<InputFile>& files, TextOptions options);

  std::int64_t vocab_size() const override { return kByteVocabSize; }
  std::int64_t end_of_document() const override { return kByteEndOfDocument; }
  std::int64_t next_document() override;
  void read(std::span<std::uint32_t> out) override;

 private:
  TextDocuments documents_;
  std::string text_;
  std::size_t text_at_ = 0;
};

}  // namespace flatshard::data
