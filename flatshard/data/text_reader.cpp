#include "flatshard/data/text_reader.h"

#include "flatshard/core/error.h"
#include "flatshard/data/utf8.h"

namespace flatshard::data {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{1} << 16;
constexpr std::size_t kMarkBytes = 4;

}  // namespace

TextReader::TextReader(std::filesystem::path path)
    : path_(std::move(path)),
      bytes_(ByteReader::open(path_)),
      chunk_(kChunkBytes) {
  begin();
}

void TextReader::begin() {
  while (pending_.size() < kMarkBytes && read_bytes()) {}
  const std::string_view mark(pending_);
  using namespace std::string_view_literals;
  FLATSHARD_CHECK(
      !mark.starts_with("\xff\xfe\0\0"sv) &&
          !mark.starts_with("\0\0\xfe\xff"sv),
      format,
      "{}: expected UTF-8 or UTF-16, got UTF-32; convert it with iconv -t "
      "utf-8",
      path_.string());
  if (mark.starts_with("\xef\xbb\xbf")) {
    pending_.erase(0, 3);
  } else if (mark.starts_with("\xff\xfe") || mark.starts_with("\xfe\xff")) {
    encoding_ =
        mark.front() == '\xff' ? Encoding::utf16_le : Encoding::utf16_be;
    pending_.erase(0, 2);
  }
}

bool TextReader::read_bytes() {
  const std::size_t n = bytes_->read(chunk_);
  pending_.append(chunk_.data(), n);
  return n > 0;
}

bool TextReader::read(std::string& text) {
  const bool more = read_bytes();
  if (!more && pending_.empty()) {
    return false;
  }
  if (encoding_ == Encoding::utf8) {
    text += pending_;
    pending_.clear();
  } else {
    decode_utf16(text, !more);
  }
  return true;
}

void TextReader::decode_utf16(std::string& text, bool at_end) {
  const auto unit = [&](std::size_t i) {
    const auto a = static_cast<unsigned char>(pending_[i]);
    const auto b = static_cast<unsigned char>(pending_[i + 1]);
    return encoding_ == Encoding::utf16_le ? a + 256U * b : b + 256U * a;
  };
  std::size_t at = 0;
  for (; at + 2 <= pending_.size(); at += 2) {
    std::uint32_t code = unit(at);
    if (code >= 0xD800 && code < 0xDC00) {
      if (at + 4 > pending_.size() && !at_end) {
        break;
      }
      const std::uint32_t low = at + 4 <= pending_.size() ? unit(at + 2) : 0;
      if (low >= 0xDC00 && low < 0xE000) {
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        at += 2;
      }
    }
    append_utf8(text, code);
  }
  pending_.erase(0, at);
  FLATSHARD_CHECK(
      !at_end || pending_.empty(),
      format,
      "{}: the UTF-16 text ends within a character; the file is cut off",
      path_.string());
}

std::string TextReader::read_all() {
  std::string text = buffer_.substr(buffer_at_);
  buffer_.clear();
  buffer_at_ = 0;
  while (read(text)) {}
  return text;
}

bool TextReader::read_line(std::string& line) {
  std::size_t searched = buffer_at_;
  for (;;) {
    const std::size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos) {
      line.assign(buffer_, buffer_at_, end - buffer_at_);
      buffer_at_ = end + 1;
      return true;
    }
    buffer_.erase(0, buffer_at_);
    buffer_at_ = 0;
    searched = buffer_.size();
    if (!read(buffer_)) {
      line = std::move(buffer_);
      buffer_.clear();
      return !line.empty();
    }
  }
}

}  // namespace flatshard::data
