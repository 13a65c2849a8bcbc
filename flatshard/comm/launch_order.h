#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "flatshard/device/stream.h"

namespace flatshard {

class Communicator;

/// The launch order of collectives of one group on a CPU: the order that the
/// program queued them in.
///
/// Streams of a CPU are threads. Two streams may launch on one group, such as
/// the all-gather streams of two models on one mesh. Their launch order would
/// then depend on thread scheduling. It would differ between ranks, and the
/// ranks would wait for each other forever. On a GPU `Stream::submit` launches
/// at once on the calling thread. NCCL runs the launches on one communicator in
/// launch order, whatever the streams.
class LaunchOrder {
 public:
  using Orders = std::vector<std::shared_ptr<LaunchOrder>>;

  /// A turn in each of some orders, all drawn at one moment: two threads that
  /// drew turns in the same two orders one by one could wait for each other.
  /// Dropping it, started or not, lets later turns start.
  class Turn {
   public:
    /// @param orders  each of them once.
    explicit Turn(Orders orders);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    /// Blocks until all earlier turns are over. The calling thread may launch
    /// from here on.
    void begin();

   private:
    Orders orders_;
    std::vector<std::int64_t> numbers_;
  };

  /// Returns whether the calling thread has started its turn.
  bool is_mine() const;

  /// Returns how many turns of each order were drawn, all counted at one
  /// moment; 0 for null. Programs that queue the same collectives draw the same
  /// turns. So one of two ranks has drawn fewer than the other, or both are at
  /// the same place.
  static std::vector<std::int64_t> num_taken(const Orders& orders);

 private:
  void begin(std::int64_t number);
  void end(std::int64_t number);

  std::int64_t num_taken_ = 0;  ///< guarded by a lock for all orders
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t current_ = 0;     ///< the earliest turn that is not over
  std::set<std::int64_t> over_;  ///< later ones that were dropped already
  std::thread::id holder_;
};

/// Submits `work` that launches collectives of `groups` and of no others. It
/// launches after all that was queued for these groups before, on this stream
/// or on others. The order is the same on each rank when the ranks' programs
/// are.
void queue_collectives(
    Stream& stream,
    std::span<Communicator* const> groups,
    std::function<void()> work);

}  // namespace flatshard
