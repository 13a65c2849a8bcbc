#include "flatshard/data/byte_documents.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "flatshard/core/error.h"

namespace flatshard::data {

void PlainFile::open(const std::filesystem::path& path) {
  close();
  path_ = path;
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check_read(fd_ >= 0);
}

bool PlainFile::read(std::span<unsigned char> out) {
  while (!out.empty()) {
    const ssize_t n = ::read(fd_, out.data(), out.size());
    if (n < 0 && errno == EINTR) {
      continue;
    }
    check_read(n >= 0);
    if (n == 0) {
      return false;
    }
    out = out.subspan(static_cast<std::size_t>(n));
  }
  return true;
}

void PlainFile::close() {
  if (fd_ >= 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

void PlainFile::check_read(bool ok) const {
  FLATSHARD_CHECK(
      ok,
      io,
      "cannot read {}: {}",
      path_.string(),
      std::strerror(errno));
}

std::int64_t ByteDocuments::next_document() {
  while (row_ == (file_ < 0 ? 0 : file().num_documents)) {
    ++file_;
    row_ = 0;
    lines_.reset();
  }
  ++row_;
  switch (file().kind()) {
    case InputKind::parquet:
      if (!parquet_) {
        parquet_.emplace(rows_, "texts", file_list(files_, InputKind::parquet));
      }
      return parquet_->read_count();
    case InputKind::jsonl:
      if (!lines_) {
        lines_.emplace(file().path, text_field_);
      }
      text_at_ = 0;
      check_there(lines_->next(text_));
      return static_cast<std::int64_t>(text_.size());
    case InputKind::text:
      break;
  }
  plain_.open(file().path);
  return file().nbytes;
}

void ByteDocuments::read(std::span<std::uint32_t> out) {
  bytes_.resize(out.size());
  if (file().kind() == InputKind::parquet) {
    parquet_->read(bytes_.data(), bytes_.size());
  } else if (file().kind() == InputKind::jsonl) {
    std::copy_n(text_.begin() + text_at_, out.size(), bytes_.begin());
    text_at_ += static_cast<std::ptrdiff_t>(out.size());
  } else {
    check_there(plain_.read(bytes_));
  }
  std::copy(bytes_.begin(), bytes_.end(), out.begin());
}

void ByteDocuments::check_there(bool ok) const {
  FLATSHARD_CHECK(
      ok,
      io,
      "{} became shorter while it was read; expected {} bytes",
      file().path.string(),
      file().nbytes);
}

}  // namespace flatshard::data
