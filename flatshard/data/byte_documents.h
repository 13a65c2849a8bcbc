#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/document_stream.h"
#include "flatshard/data/input_files.h"
#include "flatshard/data/json_lines.h"
#include "flatshard/data/python_tokenizer.h"

namespace flatshard::data {

/// A file that is read from its start, once. @throws Error{io} naming it.
class PlainFile {
 public:
  PlainFile() = default;
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;
  ~PlainFile() { close(); }

  void open(const std::filesystem::path& path);
  /// False when it ends before that.
  bool read(std::span<unsigned char> out);

 private:
  void close();
  void check_read(bool ok) const;

  std::filesystem::path path_;
  int fd_ = -1;
};

/// The documents of text, .jsonl and .parquet files: each byte is one token.
class ByteDocuments : public DocumentStream {
 public:
  /// @param files  with their numbers of documents; must outlive this.
  /// @param text_field  of .jsonl files.
  /// @param rows  reads .parquet files; used when there are any.
  ByteDocuments(
      const std::vector<InputFile>& files,
      std::string text_field,
      const PythonTokenizerOptions& rows)
      : files_(files), text_field_(std::move(text_field)), rows_(rows) {}

  std::int64_t vocab_size() const override { return kByteVocabSize; }
  std::int64_t end_of_document() const override { return kByteEndOfDocument; }
  std::int64_t next_document() override;
  void read(std::span<std::uint32_t> out) override;

 private:
  const InputFile& file() const {
    return files_[static_cast<std::size_t>(file_)];
  }
  void check_there(bool ok) const;

  const std::vector<InputFile>& files_;
  std::string text_field_;
  PythonTokenizerOptions rows_;
  std::vector<unsigned char> bytes_;
  std::ptrdiff_t file_ = -1;
  std::int64_t row_ = 0;  ///< of the file, counted when it was begun
  PlainFile plain_;
  std::optional<JsonLines> lines_;
  std::string text_;
  std::ptrdiff_t text_at_ = 0;
  std::optional<PythonChild> parquet_;
};

}  // namespace flatshard::data
