#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/core/file_reader.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/safetensors_layout.h"

namespace flatshard {

/// One tensor of a safetensors file: little-endian, row-major, no gaps.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< first byte, from the start of the data
  std::uint64_t end = 0;

  std::uint64_t nbytes() const { return end - begin; }
};

/// The header before the data of a safetensors file.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of the data
  std::map<std::string, std::string> metadata;
  std::size_t data_begin = 0;  ///< from the start of the file
};

/// Checks and reads the header of a file: known dtypes, sizes that agree with
/// shapes, data without gaps or overlaps up to the end. Format:
/// https://huggingface.co/docs/safetensors: u64 length of the header, the
/// header as JSON, then the data that its offsets point into.
///
/// @param begin  the first bytes of the file: its header, if that is valid.
/// @param nbytes  size of the file.
/// @throws Error{format} naming `file`, the tensor and what is wrong with it.
SafetensorsHeader parse_safetensors(
    std::span<const std::byte> begin,
    std::uint64_t nbytes,
    const std::string& file);

/// Reads a safetensors file: its header at once, tensors when they are asked
/// for.
class SafetensorsReader {
 public:
  /// @throws Error{io} when the file cannot be read, or like
  /// parse_safetensors.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  /// Returns the entries in the order of the data.
  const std::vector<SafetensorsEntry>& entries() const {
    return header_.entries;
  }
  /// Returns the header's __metadata__.
  const std::map<std::string, std::string>& metadata() const {
    return header_.metadata;
  }

  bool contains(std::string_view name) const;
  /// @throws Error{format} naming the nearest tensor of the file.
  const SafetensorsEntry& entry(std::string_view name) const;
  /// Returns the offset of the tensor's first byte from the start of the file.
  std::uint64_t offset(const SafetensorsEntry& entry) const {
    return header_.data_begin + entry.begin;
  }
  /// Fills `out` with the tensor's bytes from byte `begin` on.
  /// @throws Error{io} if the file was truncated after it was opened.
  void read(
      const SafetensorsEntry& entry,
      std::uint64_t begin,
      std::span<std::byte> out) const;

 private:
  FileReader file_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

/// Writes a safetensors file under a temporary name and renames it in
/// `finish`, so that no half-written file ever has the final name.
///
/// The header comes from the specs. The bytes may follow in any order and in
/// pieces.
class SafetensorsWriter {
 public:
  /// @throws Error{usage} on a name given twice or a bad shape, Error{io}.
  SafetensorsWriter(
      std::filesystem::path path,
      const std::vector<SafetensorsSpec>& specs,
      const std::map<std::string, std::string>& metadata = {});
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  /// Removes the temporary file when `finish` was not called.
  ~SafetensorsWriter();

  /// Writes bytes of a tensor, `offset` bytes from its start. Each byte must be
  /// written once.
  void write(
      std::string_view name,
      std::span<const std::byte> bytes,
      std::uint64_t offset = 0);

  /// Checks that every byte came, syncs and renames.
  /// @throws Error{usage} naming a tensor that is incomplete.
  void finish();

 private:
  struct Slot {
    std::uint64_t begin = 0;  ///< from the start of the file
    std::uint64_t nbytes = 0;
    std::uint64_t written = 0;
  };

  std::filesystem::path path_;
  std::filesystem::path partial_;
  std::unique_ptr<FileWriter> file_;
  std::map<std::string, Slot, std::less<>> slots_;
};

}  // namespace flatshard
