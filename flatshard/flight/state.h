#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/comm/collective_signature.h"

namespace flatshard {

enum class CollectiveState {
  scheduled,  ///< on the device's queue, after other work
  started,    ///< running or waiting for peers
  completed,
};

std::string_view to_string(CollectiveState state);

/// One collective in a rank's ring.
struct FlightEntry {
  std::int64_t seq = 0;  ///< position on its communicator, from 0
  CollectiveSignature signature;
  std::int64_t step = 0;
  CollectiveState state = CollectiveState::scheduled;
  std::int64_t age_ms = 0;  ///< since it was launched or, if over, completed
};

/// A hash over all signatures before `seq`.
struct FlightCheckpoint {
  std::int64_t seq = 0;
  std::uint64_t hash = 0;

  bool operator==(const FlightCheckpoint&) const = default;
};

/// One rank's collectives on one communicator.
struct FlightTrack {
  std::string group;  ///< equal on the ranks of a group and on no others
  std::string name;   ///< name of the communicator
  std::int64_t num_launched = 0;
  /// Progress of the program on this track: grows when the program queues a
  /// collective, so for all tracks in program order. On GPUs `num_launched`.
  std::int64_t num_queued = 0;
  std::vector<FlightCheckpoint> checkpoints;
  std::vector<FlightEntry> entries;  ///< the newest, ascending

  const FlightEntry* find(std::int64_t seq) const;
  /// Returns the oldest that is not completed; null: none.
  const FlightEntry* pending() const;
};

/// A collective of a rank; null pointers: none.
struct FlightPlace {
  const FlightTrack* track = nullptr;
  const FlightEntry* entry = nullptr;
};

enum class RankStatus {
  running,
  troubled,  ///< a collective threw; `message` has the error
  failed,    ///< left with an exception, see `message`
  left,      ///< ended normally
};

/// The state that a rank publishes about itself.
struct FlightState {
  int rank = 0;
  std::string host;
  std::int64_t pid = 0;
  /// Scope in which `pid` is valid: boot and pid namespace.
  std::string process_space;
  std::int64_t process_start = 0;  ///< identifies it among users of the same
                                   ///< pid
  std::int64_t beat = 0;           ///< grows while the rank runs
  RankStatus status = RankStatus::running;
  std::string message;
  std::int64_t step = 0;
  std::int64_t dump = 0;  ///< request that this full ring answers
  bool saw_leader_leave = false;
  std::vector<FlightTrack> tracks;

  const FlightTrack* find(std::string_view group) const;
  /// Returns the rank's place: it waits in `group`, or elsewhere, or the newest
  /// that it completed.
  FlightPlace current(std::string_view group) const;
};

std::string serialize(const FlightState& state);
/// @throws Error{comm} for text that `serialize` did not write.
FlightState parse_flight_state(std::string_view text);

/// This process: host, pid, process_space and process_start.
FlightState this_process(int rank);

enum class ProcessState { unknown, running, stopped, gone };

/// Looks the process up when it runs on this machine, else `unknown`.
ProcessState process_state(const FlightState& state);

}  // namespace flatshard
