#include "flatshard/data/byte_reader.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

constexpr std::size_t kInputBytes = std::size_t{1} << 16;

/// A file and the part of it that was read and not yet used.
class RawFile {
 public:
  explicit RawFile(const std::filesystem::path& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    check_read(fd_ >= 0);
    buffer_.resize(kInputBytes);
  }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;
  ~RawFile() { ::close(fd_); }

  /// Returns the bytes that are not used; at the end of the file none.
  std::string_view peek() {
    if (begin_ == end_) {
      begin_ = 0;
      end_ = read_some({buffer_.data(), buffer_.size()});
    }
    return {buffer_.data() + begin_, end_ - begin_};
  }
  void use(std::size_t nbytes) { begin_ += nbytes; }
  std::size_t read(std::span<char> out) {
    if (begin_ == end_) {
      return read_some(out);
    }
    const std::string_view part = peek().substr(0, out.size());
    std::copy(part.begin(), part.end(), out.begin());
    use(part.size());
    return part.size();
  }

  [[noreturn]] void damaged(std::string_view what, std::string_view why) const {
    FLATSHARD_THROW(
        format,
        "{}: the {} data {}; fetch or compress the file again",
        path_.string(),
        what,
        why);
  }

 private:
  std::size_t read_some(std::span<char> out) {
    for (;;) {
      const ssize_t n = ::read(fd_, out.data(), out.size());
      if (n < 0 && errno == EINTR) {
        continue;
      }
      check_read(n >= 0);
      return static_cast<std::size_t>(n);
    }
  }
  void check_read(bool ok) const {
    FLATSHARD_CHECK(
        ok,
        io,
        "cannot read {}: {}",
        path_.string(),
        std::strerror(errno));
  }

  std::filesystem::path path_;
  int fd_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

class RawReader : public ByteReader {
 public:
  explicit RawReader(std::unique_ptr<RawFile> file) : file_(std::move(file)) {}
  std::size_t read(std::span<char> out) override { return file_->read(out); }

 private:
  std::unique_ptr<RawFile> file_;
};

class GzipReader : public ByteReader {
 public:
  explicit GzipReader(std::unique_ptr<RawFile> file) : file_(std::move(file)) {
    constexpr int kGzipOnly = 16;
    FLATSHARD_CHECK(
        ::inflateInit2(&stream_, MAX_WBITS + kGzipOnly) == Z_OK,
        internal,
        "zlib cannot start");
  }
  ~GzipReader() override { ::inflateEnd(&stream_); }

  std::string_view compression() const override { return "gzip"; }

  std::size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out == out.size()) {
      const std::string_view input = file_->peek();
      if (between_ && !next_member(input)) {
        break;
      }
      if (input.empty()) {
        file_->damaged("gzip", "ends in the middle");
      }
      stream_.next_in =
          reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
      stream_.avail_in = static_cast<uInt>(input.size());
      const int status = ::inflate(&stream_, Z_NO_FLUSH);
      file_->use(input.size() - stream_.avail_in);
      if (status == Z_STREAM_END) {
        between_ = true;
        ::inflateReset(&stream_);
      } else if (status != Z_OK) {
        file_->damaged("gzip", "is damaged");
      }
    }
    return out.size() - stream_.avail_out;
  }

 private:
  /// False at the end of the file, which zeros may fill up.
  bool next_member(std::string_view input) {
    while (!input.empty() && input.front() == '\0') {
      padded_ = true;
      file_->use(1);
      input = file_->peek();
    }
    if (input.empty()) {
      return false;
    }
    if (padded_ || input.front() != '\x1f') {
      file_->damaged("gzip", "is followed by other bytes");
    }
    between_ = false;
    return true;
  }

  std::unique_ptr<RawFile> file_;
  z_stream stream_{};
  bool between_ = false;  ///< a member has ended
  bool padded_ = false;
};

class ZstdReader : public ByteReader {
 public:
  explicit ZstdReader(std::unique_ptr<RawFile> file)
      : file_(std::move(file)), stream_(::ZSTD_createDStream()) {
    // The window that `zstd --long=31` writes.
    ::ZSTD_DCtx_setParameter(stream_, ZSTD_d_windowLogMax, 31);
  }
  ~ZstdReader() override { ::ZSTD_freeDStream(stream_); }

  std::string_view compression() const override { return "zstd"; }

  std::size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos == 0) {
      const std::string_view input = file_->peek();
      if (input.empty() && !has_more_) {
        if (!at_frame_end_) {
          file_->damaged("zstd", "ends in the middle");
        }
        break;
      }
      ZSTD_inBuffer in{input.data(), input.size(), 0};
      const std::size_t status = ::ZSTD_decompressStream(stream_, &output, &in);
      file_->use(in.pos);
      if (::ZSTD_isError(status) != 0) {
        file_->damaged(
            "zstd",
            at_frame_end_ && in.pos == 0
                ? "is followed by other bytes"
                : fmt::format("is damaged ({})", ::ZSTD_getErrorName(status)));
      }
      has_more_ = status != 0 && output.pos == output.size;
      at_frame_end_ = status == 0;
    }
    return output.pos;
  }

 private:
  std::unique_ptr<RawFile> file_;
  ZSTD_DStream* stream_;
  bool at_frame_end_ = false;
  bool has_more_ = false;  ///< the last output was full
};

}  // namespace

bool begins_gzip(std::string_view bytes) {
  return bytes.starts_with("\x1f\x8b");
}

bool begins_zstd(std::string_view bytes) {
  constexpr std::size_t kMagicBytes = 4;
  // A frame, or a skippable one before it.
  return bytes.starts_with("\x28\xb5\x2f\xfd") ||
         (bytes.size() >= kMagicBytes &&
          (static_cast<unsigned char>(bytes[0]) & 0xF0U) == 0x50 &&
          bytes.substr(1).starts_with("\x2a\x4d\x18"));
}

std::unique_ptr<ByteReader> ByteReader::open(
    const std::filesystem::path& path) {
  auto file = std::make_unique<RawFile>(path);
  const std::string_view begin = file->peek();
  if (begins_gzip(begin)) {
    return std::make_unique<GzipReader>(std::move(file));
  }
  if (begins_zstd(begin)) {
    return std::make_unique<ZstdReader>(std::move(file));
  }
  return std::make_unique<RawReader>(std::move(file));
}

std::unique_ptr<ByteReader> ByteReader::open_raw(
    const std::filesystem::path& path) {
  return std::make_unique<RawReader>(std::make_unique<RawFile>(path));
}

}  // namespace flatshard::data
