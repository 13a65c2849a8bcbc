#pragma once

#include <map>

#include "flatshard/flight/diagnosis.h"

// Wording and helpers that the parts of the diagnosis share.
namespace flatshard::detail {

std::string seconds(std::chrono::milliseconds time);
/// E.g. "dp.gather #12".
std::string at(const FlightTrack& track, std::int64_t seq);
/// E.g. "step 3, unit b: all_gather of 64 Float (dp.gather #12)".
std::string describe(const FlightTrack& track, const FlightEntry& entry);
std::string with_table(
    const std::string& headline,
    std::span<const RankView> views,
    std::string_view group);
/// Returns the members of each group.
std::map<std::string, std::vector<const RankView*>> members_of_groups(
    std::span<const RankView> views);

/// Returns the first place at which ranks ran different collectives.
std::optional<Verdict> find_difference(std::span<const RankView> views);
/// Finds the same when the rings have advanced since: only the hashes show it.
std::optional<Verdict> find_diverged(std::span<const RankView> views);
/// Returns the ranks that wait for each other in different groups, although the
/// programs of all ranks reach these groups in one order.
std::optional<Verdict> find_parted(std::span<const RankView> views);

}  // namespace flatshard::detail
