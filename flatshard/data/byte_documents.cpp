#include "flatshard/data/byte_documents.h"

#include "flatshard/core/error.h"

namespace flatshard::data {

ByteDocuments::ByteDocuments(
    const std::vector<InputFile>& files,
    TextOptions options)
    : documents_(files, std::move(options)) {
  documents_.next_file();
}

std::int64_t ByteDocuments::next_document() {
  text_at_ = 0;
  while (!documents_.next_text(text_)) {
    FLATSHARD_CHECK(
        documents_.next_file().has_value(),
        io,
        "--input: files changed while they were read; prepare again");
  }
  return static_cast<std::int64_t>(text_.size());
}

void ByteDocuments::read(std::span<std::uint32_t> out) {
  for (std::uint32_t& token : out) {
    token = static_cast<unsigned char>(text_[text_at_++]);
  }
}

}  // namespace flatshard::data
