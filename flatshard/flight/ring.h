#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "flatshard/device/stream.h"
#include "flatshard/flight/recorder.h"

namespace flatshard::detail {

/// The collectives of one rank: a ring per communicator. Each call holds a lock
/// for the write of one entry; CUDA events are recorded outside of it, because
/// a full launch queue blocks them.
class FlightRing {
 public:
  FlightRing(at::Device device, int capacity)
      : device_(device), capacity_(capacity) {}

  int add_track(std::string group, std::string name);
  FlightRecorder::Ticket
  begin(int track, CollectiveSignature signature, std::int64_t step);
  void launched(FlightRecorder::Ticket ticket);
  void completed(FlightRecorder::Ticket ticket);

  /// The newest `num_entries` of each communicator and the one that waits
  /// longest. Asks the device which collectives are over.
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
  };

  struct Track {
    std::string group;
    std::string name;
    std::int64_t num_launched = 0;
    std::int64_t num_completed = 0;
    std::uint64_t hash = 0;
    std::deque<FlightCheckpoint> checkpoints;
    std::vector<Slot> slots;
  };

  Slot& slot(Track& track, std::int64_t seq) const {
    return track.slots[seq % capacity_];
  }
  void poll(Track& track);
  FlightEntry entry(Track& track, std::int64_t seq) const;

  at::Device device_;
  int capacity_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Track>> tracks_;
};

}  // namespace flatshard::detail
