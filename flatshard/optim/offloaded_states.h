#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "flatshard/device/stream.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {

/// Selects where an optimizer stores its states.
struct StateOffload {
  /// In host memory. Each step copies them to the device and back, group by
  /// group.
  bool enabled = false;
  StreamOptions streams;
};

/// Optimizer states in host memory, and their copies in a step.
///
/// Groups use two slots on the device alternately. While a group is updated,
/// the states of the next group arrive and the states of the previous group
/// leave:
///
///   upload    up(0)  up(1)             up(2)             up(3)
///   update           update(0)         update(1)         update(2)
///   download                   down(0)           down(1)
///
/// A slot is written after its last reader: down(0) waits for update(0), and
/// up(2) for down(0). All memory is allocated once and stays.
class OffloadedStates {
 public:
  OffloadedStates(at::Device device, const StreamOptions& streams);
  /// Blocks the host until queued copies are done.
  ~OffloadedStates();
  OffloadedStates(const OffloadedStates&) = delete;
  OffloadedStates& operator=(const OffloadedStates&) = delete;

  /// Gives the states of each group memory on the host, with zeros: replaces
  /// tensors of the meta device. Called once. A group may have none.
  void allocate(std::span<const std::vector<at::Tensor*>> states_of_groups);

  /// Queues the first uploads for updates of these groups, in this order. They
  /// wait for no work of other streams. Once per step, at any time before it.
  void prefetch(const std::vector<std::size_t>& groups);
  /// Starts the updates of these groups, in this order.
  void begin_step(const std::vector<std::size_t>& groups);
  /// Later work of `stream` may update the group with the states in the slot
  /// that is returned. Null: the group has no states.
  at::Tensor begin_update(std::size_t group, Stream& stream);
  /// The update of the group is queued on `stream`: queues the download of its
  /// states, and the next upload.
  void end_update(std::size_t group, Stream& stream);

  /// Replaces the group's states on the host by those in its slot.
  void use_slot(std::size_t group, const at::Tensor& slot, FlatUpdate& update)
      const;

  /// Blocks the host until the states of the last step are in host memory. The
  /// caller may then write them: the next step uploads them again.
  void wait();

  /// Returns the bytes of all states.
  std::int64_t host_nbytes() const { return host_nbytes_; }
  /// Returns the bytes of the slots.
  std::int64_t device_nbytes() const { return device_nbytes_; }

 private:
  static constexpr std::size_t kNumSlots = 2;
  /// The states of one group in host memory.
  struct Region {
    std::int64_t begin = 0;
    std::int64_t nbytes = 0;
  };
  struct Slot {
    at::Tensor memory;
    Event uploaded;
    Event downloaded;
  };

  bool has_states(std::size_t group) const {
    return regions_.at(group).nbytes > 0;
  }
  Slot& slot_of(std::size_t group) {
    return slots_[place_.at(group) % kNumSlots];
  }
  /// Queues the upload of group step_[place], if the step has one.
  void upload(std::size_t place);

  at::Device device_;
  std::shared_ptr<Stream> upload_;
  std::shared_ptr<Stream> download_;
  at::Tensor host_;
  std::int64_t host_nbytes_ = 0;
  std::int64_t device_nbytes_ = 0;
  std::vector<Region> regions_;  ///< by group
  std::array<Slot, kNumSlots> slots_;
  std::vector<std::size_t> step_;             ///< its groups with states
  std::map<std::size_t, std::size_t> place_;  ///< of each of them in step_
  Event downloaded_;                          ///< all of the last step
  std::atomic<bool> prefetched_ = false;      ///< the first groups of step_
};

}  // namespace flatshard
