#include "flatshard/format/block_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/digest.h"

namespace flatshard {
namespace {

// The block is large enough to keep the disk busy. It is small enough to be in
// the processor's cache still when it is written after its digest.
constexpr std::size_t kWriteBytes = std::size_t{8} << 20;
static_assert(kWriteBytes % kDigestBlock == 0);

class DirectFile {
 public:
  DirectFile(const std::filesystem::path& path, bool direct) : path_(path) {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    if (direct) {
      fd_ = ::open(path.c_str(), kFlags | O_DIRECT, 0666);
      direct_ = fd_ >= 0;
    }
    // tmpfs, for one, has no direct I/O.
    if (fd_ < 0 && (!direct || errno == EINVAL)) {
      fd_ = ::open(path.c_str(), kFlags, 0666);
    }
    if (fd_ < 0) {
      throw_write_error(path_);
    }
  }
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;
  ~DirectFile() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      std::size_t part = bytes.size();
      if (direct_) {
        part = part / kDirectAlignment * kDirectAlignment;
        // The end of the file, or the rest of a short write.
        if (part == 0 || offset % kDirectAlignment != 0) {
          use_page_cache();
          part = bytes.size();
        }
      }
      const ssize_t n =
          ::pwrite(fd_, bytes.data(), part, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) {
        continue;
      }
      if (n < 0 && errno == EINVAL && direct_) {
        use_page_cache();
        continue;
      }
      if (n < 0) {
        throw_write_error(path_);
      }
      offset += static_cast<std::uint64_t>(n);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }

  void close() {
    if (::fsync(fd_) != 0) {
      throw_write_error(path_);
    }
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd) != 0) {
      throw_write_error(path_);
    }
  }

 private:
  void use_page_cache() {
    const int flags = ::fcntl(fd_, F_GETFL);
    if (flags < 0 || ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) {
      throw_write_error(path_);
    }
    direct_ = false;
  }

  std::filesystem::path path_;
  int fd_ = -1;
  bool direct_ = false;
};

}  // namespace

std::vector<std::uint64_t> write_digested(
    const std::filesystem::path& path,
    std::span<const std::byte> bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  DirectFile file(path, address % kDirectAlignment == 0);
  std::vector<std::uint64_t> digests;
  digests.reserve(num_digest_blocks(bytes.size()));
  std::uint64_t offset = 0;
  while (offset < bytes.size()) {
    const auto part = bytes.subspan(
        offset,
        std::min<std::size_t>(kWriteBytes, bytes.size() - offset));
    for (std::size_t at = 0; at < part.size(); at += kDigestBlock) {
      digests.push_back(digest(part.subspan(
          at,
          std::min<std::size_t>(kDigestBlock, part.size() - at))));
    }
    file.write(offset, part);
    offset += part.size();
  }
  file.close();
  return digests;
}

}  // namespace flatshard
