// Ranks that run different collectives.
#include <algorithm>

#include "flatshard/comm/collective_signature.h"
#include "flatshard/flight/text.h"

namespace flatshard {

using namespace detail;

std::map<std::string, std::vector<const RankView*>> detail::members_of_groups(
    std::span<const RankView> views) {
  std::map<std::string, std::vector<const RankView*>> groups;
  for (const RankView& view : views) {
    for (const FlightTrack& track : view.state.tracks) {
      groups[track.group].push_back(&view);
    }
  }
  return groups;
}

std::optional<Verdict> detail::find_difference(
    std::span<const RankView> views) {
  for (const auto& [group, members] : members_of_groups(views)) {
    // All sequences that at least two members still remember.
    std::map<std::int64_t, std::vector<IssuedCollective>> by_seq;
    for (const RankView* view : members) {
      for (const FlightEntry& entry : view->state.find(group)->entries) {
        by_seq[entry.seq].push_back(
            {view->state.rank, entry.step, entry.signature});
      }
    }
    for (const auto& [seq, issued] : by_seq) {
      const std::string name = at(*members.front()->state.find(group), seq);
      if (const auto text = flatshard::find_difference(name, issued)) {
        return Verdict{ErrorCode::comm, 0, with_table(*text, views, group)};
      }
    }
  }
  return std::nullopt;
}

std::optional<Verdict> detail::find_diverged(std::span<const RankView> views) {
  for (const auto& [group, members] : members_of_groups(views)) {
    std::int64_t last_equal = 0;
    std::map<std::int64_t, std::map<std::uint64_t, std::vector<int>>> by_seq;
    for (const RankView* view : members) {
      for (const FlightCheckpoint& c : view->state.find(group)->checkpoints) {
        by_seq[c.seq][c.hash].push_back(view->state.rank);
      }
    }
    for (const auto& [seq, hashes] : by_seq) {
      if (hashes.size() == 1) {
        last_equal = seq;
        continue;
      }
      const auto fewest = std::min_element(
          hashes.begin(),
          hashes.end(),
          [](const auto& a, const auto& b) {
            return a.second.size() != b.second.size()
                       ? a.second.size() < b.second.size()
                       : a.second.front() > b.second.front();
          });
      const FlightTrack& track = *members.front()->state.find(group);
      return Verdict{
          ErrorCode::comm,
          0,
          with_table(
              fmt::format(
                  "rank {} issued other collectives than the others between {} "
                  "and #{}; {}",
                  rank_list(fewest->second),
                  at(track, last_equal),
                  seq,
                  kSameUnitsOnAllRanks),
              views,
              group)};
    }
  }
  return std::nullopt;
}

Verdict verdict_on_difference(
    const std::string& text,
    const std::string& communicator,
    std::int64_t seq,
    std::span<const IssuedCollective> issued) {
  std::vector<RankView> views(issued.size());
  for (std::size_t i = 0; i < issued.size(); ++i) {
    views[i].state.rank = issued[i].rank;
    views[i].state.tracks.push_back(
        {.name = communicator,
         .num_launched = seq + 1,
         .entries = {
             {.seq = seq,
              .signature = issued[i].signature,
              .step = issued[i].step,
              .state = CollectiveState::started}}});
  }
  return {ErrorCode::comm, 0, with_table(text, views, "")};
}

bool checkpoints_differ(std::span<const RankView> views) {
  std::map<std::pair<std::string_view, std::int64_t>, std::uint64_t> known;
  for (const RankView& view : views) {
    for (const FlightTrack& track : view.state.tracks) {
      for (const FlightCheckpoint& c : track.checkpoints) {
        const auto [at, is_new] = known.insert({{track.group, c.seq}, c.hash});
        if (!is_new && at->second != c.hash) {
          return true;
        }
      }
    }
  }
  return false;
}

}  // namespace flatshard
