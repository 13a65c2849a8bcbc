#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/device/stream.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard {

/// Memory that belongs to one use for a while. Move it back with
/// SlotPool::release.
struct Slot {
  void* data = nullptr;
  std::int64_t offset = -1;  ///< in the arena, or -1: a separate buffer
  std::int64_t nbytes = 0;
  at::Tensor dynamic;  ///< owns the buffer when it is not in the arena

  bool held() const { return data != nullptr; }
};

/// Allocates ranges of one arena at planned offsets, so that the same use has
/// the same address in every step. A use outside the plan, or with a range in
/// use, gets a separate buffer and never a wrong slot.
///
/// Streams: a range is reused without blocking the host. `acquire` makes the
/// stream that fills the slot wait for the last use of whatever lay there.
class SlotPool {
 public:
  explicit SlotPool(at::Device device) : device_(device) {}

  /// Allocates the arena. Only while no slot is in use.
  void set_arena(std::int64_t nbytes);

  /// @param offset  planned, or -1.
  /// @param filler  the stream that writes the slot first; it waits for the
  ///   former tenants of the range.
  Slot acquire(
      std::int64_t offset,
      std::int64_t nbytes,
      const std::shared_ptr<Stream>& filler);

  /// @param last_use  after this event the range may be overwritten.
  /// @param filler    as in acquire; a dynamic buffer is freed on it.
  void
  release(Slot& slot, Event last_use, const std::shared_ptr<Stream>& filler);

  /// Forgets the uses that a next tenant of each range has to wait for. Only
  /// while the device is idle; needed after an error, because those events
  /// would repeat it.
  void forget_uses();

  std::int64_t arena_nbytes() const {
    return arena_.defined() ? arena_.numel() : 0;
  }
  /// Returns the bytes of slots in use outside the arena.
  std::int64_t dynamic_nbytes() const { return dynamic_nbytes_; }
  /// Returns the peak number of bytes in use.
  std::int64_t peak_held_nbytes() const { return peak_held_nbytes_; }
  int num_held() const { return num_held_; }
  /// Returns how many slots had to be allocated outside the arena so far.
  std::int64_t num_dynamic() const { return num_dynamic_; }

 private:
  struct Tenant {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool held = true;
    Event last_use;
  };

  at::Device device_;
  at::Tensor arena_;  ///< [nbytes] bytes
  std::vector<Tenant> tenants_;
  std::int64_t held_nbytes_ = 0;
  std::int64_t dynamic_nbytes_ = 0;
  std::int64_t peak_held_nbytes_ = 0;
  std::int64_t num_dynamic_ = 0;
  int num_held_ = 0;
};

}  // namespace flatshard
