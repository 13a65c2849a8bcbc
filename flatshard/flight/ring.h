#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "flatshard/comm/launch_order.h"
#include "flatshard/device/stream.h"
#include "flatshard/flight/captured.h"
#include "flatshard/flight/recorder.h"

namespace flatshard::detail {

/// The collectives of one rank: a ring per communicator. Each call locks a
/// mutex while it writes one entry. CUDA events are recorded outside the lock,
/// because a full launch queue blocks them.
class FlightRing {
 public:
  FlightRing(at::Device device, int capacity)
      : device_(device), capacity_(capacity) {}

  /// @param order  of its launches; null: they are launched as they are queued.
  int add_track(
      std::string group,
      std::string name,
      std::shared_ptr<LaunchOrder> order = nullptr);
  FlightRecorder::Ticket
  begin(int track, CollectiveSignature signature, std::int64_t step);
  void launched(FlightRecorder::Ticket ticket);
  void completed(FlightRecorder::Ticket ticket);

  // Graphs with collectives. Collectives that start on a stream that records,
  // between the second and the third, belong to the graph and run with each
  // replay.

  /// Called before the recording.
  std::shared_ptr<CapturedCollectives> make_captured();
  /// First in the recording, on the current stream.
  void begin_capture(std::shared_ptr<CapturedCollectives> captured);
  /// Last in it, or after it has failed.
  void end_capture(bool failed);
  /// The graph was launched, and with it its collectives.
  /// @param done  marks the end of the launch.
  void replayed(
      const std::shared_ptr<CapturedCollectives>& captured,
      std::int64_t step,
      Event done);

  /// Returns the newest `num_entries` of each communicator and the one that
  /// waits longest. Asks the device which collectives are over.
  std::vector<FlightTrack> tracks(int num_entries);

 private:
  using Clock = std::chrono::steady_clock;

  struct Slot {
    CollectiveSignature signature;
    std::int64_t step = 0;
    Clock::time_point launched_at;
    Clock::time_point completed_at;
    // CUDA: around the collective on its stream. Valid once `on_stream`.
    Event before;
    Event after;
    bool on_stream = false;
    // Replaces the events of a collective in a graph: the launch, and the
    // number of the collective on its track.
    std::shared_ptr<CapturedCollectives> captured;
    std::shared_ptr<const CapturedCollectives::Replay> replay;
    std::uint32_t index = 0;
  };

  struct Track {
    std::string group;
    std::string name;
    std::shared_ptr<LaunchOrder> order;
    std::int64_t num_launched = 0;
    std::int64_t num_completed = 0;
    std::uint64_t hash = 0;
    std::deque<FlightCheckpoint> checkpoints;
    std::vector<Slot> slots;
  };

  static std::int64_t capacity(const Track& track) {
    return static_cast<std::int64_t>(track.slots.size());
  }
  static Slot& slot(Track& track, std::int64_t seq) {
    return track.slots[seq % capacity(track)];
  }
  /// @return  the slot of one more collective.
  Slot& append(Track& track, CollectiveSignature signature, std::int64_t step)
      const;
  static void grow(Track& track, std::int64_t capacity);
  void poll(std::size_t index);
  FlightEntry entry(std::size_t index, std::int64_t seq) const;

  at::Device device_;
  int capacity_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Track>> tracks_;
  std::shared_ptr<CapturedCollectives> captured_;  ///< being recorded
};

}  // namespace flatshard::detail
