#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "flatshard/comm/collective_signature.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/stream_word.h"

namespace flatshard {

namespace detail {
class FlightRing;
}

/// The collectives in a graph, and the progress of the current replay: numbers
/// that the graph itself writes, since events in a graph cannot be queried.
/// Belongs to a FlightRecorder and to the owner of the graph.
class CapturedCollectives {
 public:
  /// @param num_tracks  communicators that are watched.
  CapturedCollectives(at::Device device, std::size_t num_tracks);

  /// The collectives of one communicator.
  struct Track {
    std::vector<CollectiveSignature> signatures;
    // How many of them the device has started, and how many it has completed.
    std::unique_ptr<StreamWord> begun;
    std::unique_ptr<StreamWord> ended;
  };
  std::vector<Track>& tracks() { return tracks_; }
  /// 1 within a replay.
  StreamWord& running() { return *running_; }

 private:
  friend class detail::FlightRing;

  /// One launch of the graph: its end.
  using Replay = Event;

  // Under the ring's lock.
  bool is_over(const Replay& replay) const;
  /// It is the one whose numbers the words are.
  bool runs(const Replay& replay);
  /// Returns how many collectives of a track the device has started, or has
  /// completed.
  std::uint32_t num_begun(const Replay& replay, std::size_t track);
  std::uint32_t num_ended(const Replay& replay, std::size_t track);

  std::vector<Track> tracks_;  ///< in the order of the ring's tracks
  std::unique_ptr<StreamWord> running_;
  /// Launched and not known to be over, oldest first.
  std::deque<std::shared_ptr<const Replay>> replays_;
};

}  // namespace flatshard
