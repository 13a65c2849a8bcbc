// Finds ranks that run different collectives.
#include <algorithm>
#include <cstddef>
#include <utility>

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

namespace {

// Progress of a rank's program on each of its groups, by group name.
using Progress = std::vector<std::pair<std::string_view, std::int64_t>>;

Progress progress_of(const RankView& view) {
  Progress progress;
  for (const FlightTrack& track : view.state.tracks) {
    progress.emplace_back(track.group, track.num_queued);
  }
  std::ranges::sort(progress);
  return progress;
}

// The groups that two ranks share are compared. Returns one on which `a` is
// ahead and one on which `b` is, empty where there is none.
std::pair<std::string_view, std::string_view> ahead(
    const Progress& a,
    const Progress& b) {
  std::pair<std::string_view, std::string_view> groups;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    if (i->first != j->first) {
      ++(i->first < j->first ? i : j);
      continue;
    }
    if (i->second != j->second) {
      (i->second > j->second ? groups.first : groups.second) = i->first;
    }
    ++i;
    ++j;
  }
  return groups;
}

struct Parting {
  const RankView* a = nullptr;
  const RankView* b = nullptr;
  std::string_view group_of_a;  ///< on which `a` is ahead of `b`
  std::string_view group_of_b;
};

// The programs of all ranks queue the same collectives in the same order. So
// one of two ranks has queued less than the other on all groups that they
// share, or both are at the same place. Two ranks that are each ahead on one
// group have diverged. Only waiting ranks are compared, since the others may
// still advance.
std::optional<Parting> find_parting(std::span<const RankView> views) {
  std::vector<std::pair<const RankView*, Progress>> waiting;
  for (const RankView& view : views) {
    if (view.seen && !view.missing && view.waits) {
      waiting.emplace_back(&view, progress_of(view));
    }
  }
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    for (std::size_t j = i + 1; j < waiting.size(); ++j) {
      const auto groups = ahead(waiting[i].second, waiting[j].second);
      if (!groups.first.empty() && !groups.second.empty()) {
        return Parting{
            waiting[i].first,
            waiting[j].first,
            groups.first,
            groups.second};
      }
    }
  }
  return std::nullopt;
}

std::string waits_in(const RankView& view, std::string_view group) {
  const FlightPlace place = view.state.current(group);
  return fmt::format(
      "rank {} waits in {}",
      view.state.rank,
      describe(*place.track, *place.entry));
}

}  // namespace

bool programs_part(std::span<const RankView> views) {
  return find_parting(views).has_value();
}

std::optional<Verdict> detail::find_parted(std::span<const RankView> views) {
  const auto parting = find_parting(views);
  if (!parting) {
    return std::nullopt;
  }
  return Verdict{
      ErrorCode::comm,
      0,
      with_table(
          fmt::format(
              "ranks {} and {} followed different paths: {}, and {}; {}",
              parting->a->state.rank,
              parting->b->state.rank,
              waits_in(*parting->a, parting->group_of_a),
              waits_in(*parting->b, parting->group_of_b),
              kSameUnitsOnAllRanks),
          views,
          parting->group_of_a)};
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
