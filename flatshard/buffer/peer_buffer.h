#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/peer/peer_memory.h"

namespace flatshard {

/// A sharded FlatBuffer with a local part that the other ranks of its
/// all-gather can read: each rank copies all parts together on its own, where
/// FlatBuffer::redistribute runs an all-gather. The bytes are the same.
class PeerBuffer {
 public:
  /// Zeroed. Collective.
  ///
  /// @param placements  with one group of sharded axes.
  /// @throws Error{config, memory} as PeerMemory::create.
  PeerBuffer(
      std::shared_ptr<const FlatLayout> layout,
      std::shared_ptr<Mesh> mesh,
      Placements placements,
      at::ScalarType dtype);

  const FlatBuffer& local() const { return local_; }
  /// Fences through the communicators of `mesh` from now on. It has the axes of
  /// the one before.
  void use_mesh(Mesh& mesh);

  /// Later copies of every rank see what every rank wrote before its own call.
  /// Collective; inside Stream::submit.
  void fence() const { group_->fence(); }
  /// Later writes of every rank happen after the copies that each rank's stream
  /// had before its own call. Collective; inside Stream::submit, and on any
  /// stream: it is not a collective of the group that all-gathers.
  void fence_writes() const { writes_->fence(); }
  /// Copies all ranks' parts. Inside Stream::submit; not a collective.
  /// @param out  [layout.numel()] of the buffer's dtype; overwritten.
  void copy_whole(const at::Tensor& out) const;
  /// The same for some adjacent segments of the layout.
  /// @param out  their data, one after the other; overwritten.
  void copy_segments(
      std::int64_t first,
      std::int64_t count,
      const at::Tensor& out) const;

 private:
  struct Part {
    std::int64_t segment = 0;
    std::int64_t offset = 0;  ///< bytes, in the full buffer
    const char* source = nullptr;
    std::int64_t nbytes = 0;
  };

  std::vector<int> axes_;  ///< of the all-gather
  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Communicator> writes_;
  std::unique_ptr<PeerMemory> memory_;
  FlatBuffer local_;
  std::vector<Part> parts_;  ///< in the order in which they are copied
};

}  // namespace flatshard
