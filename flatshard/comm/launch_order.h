#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>

#include "flatshard/device/stream.h"

namespace flatshard {

class Communicator;

/// The order in which collectives of one group are launched on a CPU: the order
/// in which the program queued them.
///
/// Streams of a CPU are threads. Two streams that launch on one group, such as
/// the gather streams of two models on one mesh, would otherwise launch in the
/// order in which their threads happen to run. That order differs between
/// ranks, and the ranks would wait for each other forever. On a GPU
/// `Stream::submit` launches at once on the calling thread, and NCCL runs what
/// was launched on one communicator in launch order, whatever the streams.
class LaunchOrder {
 public:
  /// A place in the order. Dropping it, begun or not, lets later turns begin.
  class Turn {
   public:
    explicit Turn(std::shared_ptr<LaunchOrder> order);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    /// Blocks until all earlier turns are over. The calling thread may launch
    /// from here on.
    void begin();

   private:
    std::shared_ptr<LaunchOrder> order_;
    std::int64_t number_;
  };

  /// The calling thread has begun its turn.
  bool is_mine() const;

 private:
  std::int64_t take();
  void begin(std::int64_t number);
  void end(std::int64_t number);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t num_taken_ = 0;
  std::int64_t current_ = 0;     ///< the earliest turn that is not over
  std::set<std::int64_t> over_;  ///< later ones that were dropped already
  std::thread::id holder_;
};

/// Submits `work`, which launches collectives of `groups` and of no others.
/// It launches after all that was queued for these groups before, on this
/// stream or on others, and on each rank alike when the ranks' programs are.
void queue_collectives(
    Stream& stream,
    std::span<Communicator* const> groups,
    std::function<void()> work);

}  // namespace flatshard
