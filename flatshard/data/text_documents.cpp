#include "flatshard/data/text_documents.h"

#include <algorithm>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/data/byte_reader.h"
#include "flatshard/data/text_reader.h"
#include "flatshard/data/utf8.h"

namespace flatshard::data {
namespace {

std::string all_bytes(const std::filesystem::path& path) {
  constexpr std::size_t kChunkBytes = std::size_t{1} << 16;
  const auto reader = ByteReader::open_raw(path);
  std::vector<char> chunk(kChunkBytes);
  std::string bytes;
  while (const std::size_t n = reader->read(chunk)) {
    bytes.append(chunk.data(), n);
  }
  return bytes;
}

/// Returns the Parquet files' paths, each ended by a zero byte.
std::string parquet_paths(const std::vector<InputFile>& files) {
  std::string all;
  for (const InputFile& file : files) {
    if (file.kind == InputKind::parquet) {
      all += file.path.string();
      all.push_back('\0');
    }
  }
  return all;
}

}  // namespace

TextDocuments::TextDocuments(
    const std::vector<InputFile>& files,
    TextOptions options)
    : files_(files), options_(std::move(options)) {
}

std::optional<std::size_t> TextDocuments::next_file() {
  file_ = begun_ ? file_ + 1 : 0;
  begun_ = true;
  at_end_ = false;
  rows_.reset();
  if (file_ >= files_.size()) {
    return std::nullopt;
  }
  return file_;
}

bool TextDocuments::next_text(std::string& text) {
  while (!at_end_) {
    if (!read_text(text)) {
      at_end_ = true;
    } else if (text.empty()) {
      ++num_empty_;
    } else {
      return true;
    }
  }
  return false;
}

std::string TextDocuments::where() const {
  const std::string path = files_[file_].path.string();
  return rows_ ? fmt::format("{}:{}", path, rows_->line()) : path;
}

bool TextDocuments::read_text(std::string& text) {
  const InputFile& file = files_[file_];
  FLATSHARD_CHECK(
      !options_.whole_rows || file.kind == InputKind::json,
      format,
      "{}: --chat takes JSON rows (.jsonl, .ndjson or .json), and this file "
      "has none",
      file.path.string());
  switch (file.kind) {
    case InputKind::json:
      if (!rows_) {
        rows_.emplace(file.path, options_.text_field, options_.whole_rows);
      }
      return rows_->next(text);
    case InputKind::parquet:
      if (!parquet_) {
        parquet_.emplace(
            PythonTokenizerOptions{
                .python = options_.python,
                .text_field = options_.text_field},
            "texts",
            parquet_paths(files_));
      }
      return parquet_->read_text_of_file(text);
    case InputKind::text:
    case InputKind::bytes:
      break;
  }
  at_end_ = true;  // one text
  return read_whole(text);
}

bool TextDocuments::read_whole(std::string& text) {
  const InputFile& file = files_[file_];
  if (file.kind == InputKind::bytes) {
    text = all_bytes(file.path);
    return true;
  }
  text = TextReader(file.path).read_all();
  if (options_.replace_invalid) {
    num_replaced_ += replace_invalid_utf8(text);
  }
  const std::size_t bad = find_invalid_utf8(text);
  if (bad != kAllUtf8) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(bad);
    FLATSHARD_THROW(
        format,
        "{}:{}: expected UTF-8, got the byte 0x{:02x} (byte {} of the text). "
        "Convert the file, for example with iconv -f latin1 -t utf-8; or give "
        "--format text, which replaces such bytes by U+FFFD, or --format bytes",
        file.path.string(),
        1 + std::count(text.begin(), end, '\n'),
        static_cast<unsigned char>(*end),
        bad);
  }
  return true;
}

}  // namespace flatshard::data
