#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace flatshard {

/// An entire file mapped read-only into memory. Move-only; an empty file maps
/// to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  /// @throws Error{io} when the file cannot be opened or mapped.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  void unmap() noexcept;

  std::span<const std::byte> bytes_;
};

}  // namespace flatshard
