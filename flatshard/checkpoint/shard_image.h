#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/format/manifest.h"

namespace flatshard {

/// The files that one rank writes of a checkpoint, byte for byte as they will
/// stand on disk, in one host buffer: boxes are copied to their places in it,
/// and the buffer goes to the disk as it is.
///
/// The places depend on the model and the mesh alone, so they are made once.
class ShardImage {
 public:
  /// @param boxes  what this rank writes; the tensors must stay.
  /// @param max_file_nbytes  a file that would grow longer is followed by
  ///   another one; a box is never cut.
  ShardImage(
      std::vector<OwnedBox> boxes,
      int rank,
      int world,
      std::uint64_t max_file_nbytes);

  /// Returns the bytes of the buffer.
  std::int64_t nbytes() const { return nbytes_; }
  /// This rank's part of the manifest; files have no digests yet.
  const Manifest& part() const { return part_; }

  /// Writes the headers into a fresh `buffer` [nbytes()], uint8 on the host.
  void write_heads(const at::Tensor& buffer) const;
  /// Copies all boxes into `buffer`, on the current stream; does not wait for a
  /// device.
  void copy_boxes(const at::Tensor& buffer) const;
  /// File `index` of the part, in `buffer`.
  std::span<const std::byte> file(const at::Tensor& buffer, std::size_t index)
      const;

 private:
  void add_file(std::span<const std::size_t> boxes, const std::string& name);

  struct Place {
    std::size_t box = 0;
    std::int64_t begin = 0;  ///< first byte in the buffer
  };
  struct Head {
    std::int64_t begin = 0;
    std::string bytes;
  };

  std::vector<OwnedBox> boxes_;
  Manifest part_;
  std::vector<Place> places_;
  std::vector<Head> heads_;
  std::int64_t nbytes_ = 0;
};

}  // namespace flatshard
