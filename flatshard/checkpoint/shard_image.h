#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/format/manifest.h"

namespace flatshard {

/// The files that one rank writes of a checkpoint, byte for byte as on disk, in
/// one host buffer: boxes are copied to their offsets in it, and the buffer is
/// written unchanged.
///
/// The offsets depend only on the model and the mesh and are computed once.
class ShardImage {
 public:
  /// @param boxes  to be written by this rank; the tensors must stay alive.
  /// @param max_file_nbytes  a new file starts before a file would exceed it; a
  ///   box is never split.
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
  /// Copies the boxes for which `is_copied` returns true into `buffer`, on the
  /// current stream; does not wait for a device.
  void copy_boxes(
      const at::Tensor& buffer,
      const std::function<bool(const OwnedBox&)>& is_copied) const;
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
