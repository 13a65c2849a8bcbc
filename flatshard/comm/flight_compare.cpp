// Ranks that run different collectives.
#include <algorithm>

#include "flatshard/comm/flight_text.h"

namespace flatshard {
namespace {

using namespace detail;

// The signature that most members have; ties go to the lowest rank's.
std::size_t usual(std::span<const FlightEntry> entries) {
  std::size_t best = 0;
  std::ptrdiff_t best_count = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto count =
        std::count_if(entries.begin(), entries.end(), [&](const auto& e) {
          return e.signature == entries[i].signature;
        });
    if (count > best_count) {
      best = i;
      best_count = count;
    }
  }
  return best;
}

std::string_view what_differs(
    const CollectiveSignature& a,
    const CollectiveSignature& b) {
  return a.kind != b.kind     ? "another collective"
         : a.unit != b.unit   ? "the collective of another unit"
         : a.numel != b.numel ? "another size"
         : a.dtype != b.dtype ? "another dtype"
                              : "another operation or root";
}

}  // namespace

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
    std::
        map<std::int64_t, std::pair<std::vector<FlightEntry>, std::vector<int>>>
            by_seq;
    for (const RankView* view : members) {
      for (const FlightEntry& entry : view->state.find(group)->entries) {
        auto& [entries, ranks] = by_seq[entry.seq];
        entries.push_back(entry);
        ranks.push_back(view->state.rank);
      }
    }
    for (const auto& [seq, found] : by_seq) {
      const std::string name = at(*members.front()->state.find(group), seq);
      if (auto verdict = compare_signatures(name, found.first, found.second)) {
        verdict->text = with_table(verdict->text, views, group);
        return verdict;
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
                  "and #{}; all ranks must run the same units in the same "
                  "order, with equal sizes and dtypes",
                  rank_list(fewest->second),
                  at(track, last_equal),
                  seq),
              views,
              group)};
    }
  }
  return std::nullopt;
}

std::optional<Verdict> compare_signatures(
    const std::string& communicator,
    std::span<const FlightEntry> entries,
    std::span<const int> ranks) {
  if (entries.empty()) {
    return std::nullopt;
  }
  const std::size_t common = usual(entries);
  const CollectiveSignature& expected = entries[common].signature;
  std::vector<int> same;
  std::vector<int> others;
  const FlightEntry* first = nullptr;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool equal = entries[i].signature == expected;
    (equal ? same : others).push_back(ranks[i]);
    if (!equal && first == nullptr) {
      first = &entries[i];
    }
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  std::string text = fmt::format(
      "rank {} issues {} at {}: it is in {}, {} in {}",
      others.front(),
      what_differs(expected, first->signature),
      communicator,
      describe(*first),
      same.size() == 1 ? fmt::format("rank {}", same.front())
                       : fmt::format("ranks {}", rank_list(same)),
      describe(entries[common]));
  if (others.size() > 1) {
    text += fmt::format("; different are ranks {}", rank_list(others));
  }
  text += "; all ranks must run the same units in the same order, with equal "
          "sizes and dtypes";
  return Verdict{ErrorCode::comm, 0, std::move(text)};
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
