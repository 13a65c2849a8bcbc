#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// Returns the bytes per element of a safetensors dtype ("F32", "BF16", "F16",
/// "I64", ...).
/// @throws Error{format} naming the known ones.
std::int64_t safetensors_item_nbytes(std::string_view dtype);

/// Computes the bytes of a tensor; false on a negative dimension or an
/// overflow.
bool safetensors_nbytes(
    const std::vector<std::int64_t>& shape,
    std::int64_t item_nbytes,
    std::uint64_t& nbytes);

/// A writer's description of a tensor.
struct SafetensorsSpec {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
};

/// The first bytes of a safetensors file and the place of everything after
/// them. Tensors are laid out by falling element size, then by name, after a
/// header padded to 64 bytes. So each is aligned to its element.
class SafetensorsLayout {
 public:
  struct Slot {
    std::uint64_t begin = 0;  ///< first byte, from the start of the file
    std::uint64_t nbytes = 0;
  };

  /// @param file  for messages.
  /// @throws Error{usage} on a name given twice, a bad shape or a header that
  /// grows too long, Error{format} on an unknown dtype.
  SafetensorsLayout(
      const std::vector<SafetensorsSpec>& specs,
      const std::map<std::string, std::string>& metadata,
      const std::string& file);

  /// Returns the length of the header and the header: bytes [0, head().size()).
  const std::string& head() const { return head_; }
  /// Returns the size of the file in bytes.
  std::uint64_t nbytes() const { return nbytes_; }
  const std::map<std::string, Slot, std::less<>>& slots() const {
    return slots_;
  }

 private:
  std::string head_;
  std::uint64_t nbytes_ = 0;
  std::map<std::string, Slot, std::less<>> slots_;
};

}  // namespace flatshard
