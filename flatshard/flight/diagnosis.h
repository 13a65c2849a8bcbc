#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/flight/state.h"

// Finds the rank at fault from the published states. Pure: no store, no clock.
namespace flatshard {

/// One rank as the judging rank sees it.
struct RankView {
  FlightState state;
  bool seen = false;     ///< false: it never published anything
  bool missing = false;  ///< not heard of for too long, or its process is gone
  bool waits = false;    ///< in one collective for its last two heartbeats
  std::chrono::milliseconds silent{0};
  ProcessState process = ProcessState::unknown;
};

struct Verdict {
  ErrorCode code = ErrorCode::timeout;
  int num_missing = 0;  ///< ranks that cannot read it any more
  std::string text;

  bool operator==(const Verdict&) const = default;
};

std::string serialize(const Verdict& verdict);
Verdict parse_verdict(std::string_view text);

/// Returns the first rank that is missing, differs or is late, in this order,
/// and what every rank was doing. `views` has one entry per rank, in rank
/// order.
///
/// @param stalled_after  a collective that waits this long is stuck.
Verdict diagnose(
    std::span<const RankView> views,
    std::chrono::milliseconds stalled_after);

/// Returns whether two ranks of a group disagree on their history up to a
/// common checkpoint.
bool checkpoints_differ(std::span<const RankView> views);

/// Returns whether two ranks wait, and each is further in the program than the
/// other.
bool programs_part(std::span<const RankView> views);

/// Returns whether a rank waits in a collective, and another of the group has
/// ended its run before it.
bool waits_for_who_left(std::span<const RankView> views);

/// Returns the collectives that the ranks of a group issued where they differ,
/// all at sequence `seq` of `communicator`: `text` and a table of them.
Verdict verdict_on_difference(
    const std::string& text,
    const std::string& communicator,
    std::int64_t seq,
    std::span<const IssuedCollective> issued);

/// Returns a row per group of ranks that did the same.
std::string flight_table(
    std::span<const RankView> views,
    std::string_view group);

}  // namespace flatshard
