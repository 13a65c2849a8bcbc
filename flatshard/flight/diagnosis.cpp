#include "flatshard/flight/diagnosis.h"

#include <algorithm>
#include <map>

#include "flatshard/flight/text.h"

namespace flatshard {
namespace {

using namespace detail;
using std::chrono::milliseconds;

std::string process_text(const RankView& view) {
  const FlightState& s = view.state;
  const std::string process =
      fmt::format("process {} on host {}", s.pid, s.host);
  switch (view.process) {
    case ProcessState::gone:
      return process + " has ended";
    case ProcessState::stopped:
      return process + " is stopped by a signal";
    default:
      return process;
  }
}

std::string last_seen(const FlightState& state) {
  const FlightPlace last = state.current({});
  if (last.entry == nullptr) {
    return "its last heartbeat came before its first collective";
  }
  return fmt::format(
      "last seen in {}: {} ({}, {})",
      place_of(last.entry->step, last.entry->signature),
      describe(last.entry->signature),
      at(*last.track, last.entry->seq),
      to_string(last.entry->state));
}

// The collective that most ranks wait in, blocked by a missing rank.
struct Stuck {
  std::string group;
  std::int64_t seq = -1;
  std::vector<int> waiting;
  const FlightTrack* track = nullptr;
  const FlightEntry* entry = nullptr;
  milliseconds age{0};
};

// Returns the oldest waiting collective of every group.
std::vector<Stuck> stuck_groups(std::span<const RankView> views) {
  std::map<std::string, Stuck> groups;
  for (const RankView& view : views) {
    if (!view.seen || view.missing) {
      continue;
    }
    for (const FlightTrack& track : view.state.tracks) {
      const FlightEntry* entry = track.pending();
      if (entry == nullptr) {
        continue;
      }
      Stuck& stuck = groups[track.group];
      if (stuck.entry == nullptr || entry->seq < stuck.seq) {
        stuck = {track.group, entry->seq, {}, &track, entry, milliseconds(0)};
      }
      if (entry->seq == stuck.seq) {
        stuck.waiting.push_back(view.state.rank);
        stuck.age = std::max(stuck.age, milliseconds(entry->age_ms));
      }
    }
  }
  std::vector<Stuck> result;
  for (auto& [group, stuck] : groups) {
    result.push_back(std::move(stuck));
  }
  std::stable_sort(
      result.begin(),
      result.end(),
      [](const Stuck& a, const Stuck& b) { return a.age > b.age; });
  return result;
}

std::string who_waits(const Stuck& stuck) {
  return stuck.waiting.size() == 1
             ? fmt::format("rank {} waits", stuck.waiting.front())
             : fmt::format("ranks {} wait", rank_list(stuck.waiting));
}

std::string waiting_text(const Stuck& stuck) {
  return fmt::format(
      "{} for {} in {}",
      who_waits(stuck),
      seconds(stuck.age),
      describe(*stuck.track, *stuck.entry));
}

std::optional<Verdict> find_failed(std::span<const RankView> views) {
  for (const RankView& view : views) {
    if (view.seen && view.state.status == RankStatus::failed) {
      return Verdict{
          ErrorCode::comm,
          0,
          with_table(
              fmt::format(
                  "rank {} of {} failed: {}",
                  view.state.rank,
                  views.size(),
                  view.state.message),
              views,
              {})};
    }
  }
  return std::nullopt;
}

std::optional<Verdict> find_missing(std::span<const RankView> views) {
  std::vector<int> missing;
  const RankView* first = nullptr;
  const auto worse = [](const RankView& a, const RankView& b) {
    const bool a_gone = a.process == ProcessState::gone;
    const bool b_gone = b.process == ProcessState::gone;
    return a_gone != b_gone ? a_gone : a.silent > b.silent;
  };
  for (const RankView& view : views) {
    if (view.missing) {
      missing.push_back(view.state.rank);
      if (first == nullptr || worse(view, *first)) {
        first = &view;
      }
    }
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  std::string text = fmt::format(
      "rank {} of {} is missing: ",
      first->state.rank,
      views.size());
  if (!first->seen) {
    text += fmt::format(
        "it has not arrived within {}; see its own message",
        seconds(first->silent));
  } else {
    text += fmt::format(
        "no heartbeat for {}, {}; {}",
        seconds(first->silent),
        process_text(*first),
        last_seen(first->state));
  }
  if (missing.size() > 1) {
    text += fmt::format("; missing are ranks {}", rank_list(missing));
  }
  const auto stuck = stuck_groups(views);
  if (!stuck.empty()) {
    text += "; " + waiting_text(stuck.front());
  }
  const bool gone = first->process == ProcessState::gone;
  return Verdict{
      gone ? ErrorCode::comm : ErrorCode::timeout,
      static_cast<int>(missing.size()),
      with_table(
          std::move(text),
          views,
          stuck.empty() ? std::string_view() : stuck.front().group)};
}

struct Late {
  Stuck stuck;
  const RankView* rank = nullptr;
  std::vector<int> all;
  bool waits_elsewhere = false;
};

// Finds a rank that did not reach a stuck collective. A rank that waits nowhere
// is the cause. A rank that waits elsewhere is blocked itself.
std::optional<Late> find_latest(std::span<const RankView> views) {
  std::optional<Late> best;
  const auto groups = members_of_groups(views);
  for (const Stuck& stuck : stuck_groups(views)) {
    Late late{stuck, nullptr, {}, true};
    for (const RankView* view : groups.at(stuck.group)) {
      if (view->state.find(stuck.group)->num_launched > stuck.seq) {
        continue;
      }
      late.all.push_back(view->state.rank);
      const FlightPlace now = view->state.current(stuck.group);
      const bool waits = now.entry != nullptr &&
                         now.entry->state != CollectiveState::completed;
      if (late.rank == nullptr || (late.waits_elsewhere && !waits)) {
        late.rank = view;
        late.waits_elsewhere = waits;
      }
    }
    if (late.rank != nullptr &&
        (!best || (best->waits_elsewhere && !late.waits_elsewhere))) {
      best = std::move(late);
    }
  }
  return best;
}

std::string late_text(const Late& late, std::size_t world) {
  const FlightState& state = late.rank->state;
  const FlightEntry& entry = *late.stuck.entry;
  const FlightTrack& track = *late.stuck.track;
  const bool left = state.status == RankStatus::left;
  std::string text = fmt::format(
      "rank {} of {} {}: it has not reached {}",
      state.rank,
      world,
      left ? "has ended its run" : "is late",
      describe(track, entry));
  const FlightPlace now = state.current(late.stuck.group);
  if (late.waits_elsewhere) {
    text +=
        fmt::format(", since it waits in {}", describe(*now.track, *now.entry));
  } else if (!left && now.entry != nullptr) {
    text += fmt::format(
        "; it runs, in no collective for {}, after {}: {}",
        seconds(milliseconds(now.entry->age_ms)),
        place_of(now.entry->step, now.entry->signature),
        describe(now.entry->signature));
  }
  if (late.rank->process == ProcessState::stopped) {
    text += "; " + process_text(*late.rank);
  }
  if (late.all.size() > 1) {
    text += fmt::format("; late are ranks {}", rank_list(late.all));
  }
  return fmt::format(
      "{}; {} there for {}{}",
      text,
      who_waits(late.stuck),
      seconds(late.stuck.age),
      left ? "; all ranks must run the same number of steps: let them agree on "
             "the last one, for instance by an all-reduce of what is left"
           : "");
}

// All ranks have launched the collective. Some devices wait in it for other
// devices that are still busy with earlier work.
std::optional<Verdict> find_held_device(std::span<const RankView> views) {
  const auto groups = members_of_groups(views);
  for (const Stuck& stuck : stuck_groups(views)) {
    std::vector<int> late;
    std::vector<int> there;
    for (const RankView* view : groups.at(stuck.group)) {
      const FlightEntry* entry = view->state.find(stuck.group)->find(stuck.seq);
      if (entry != nullptr && entry->state == CollectiveState::scheduled) {
        late.push_back(view->state.rank);
      } else if (entry != nullptr && entry->state == CollectiveState::started) {
        there.push_back(view->state.rank);
      }
    }
    if (late.empty() || there.empty()) {
      continue;
    }
    std::string text = fmt::format(
        "rank {} of {} is late: its device has not reached {}",
        late.front(),
        views.size(),
        describe(*stuck.track, *stuck.entry));
    if (late.size() > 1) {
      text += fmt::format("; late are ranks {}", rank_list(late));
    }
    Stuck waiting = stuck;
    waiting.waiting = there;
    text += fmt::format(
        "; {} there for {}",
        who_waits(waiting),
        seconds(stuck.age));
    return Verdict{
        ErrorCode::timeout,
        0,
        with_table(std::move(text), views, stuck.group)};
  }
  return std::nullopt;
}

Verdict find_trouble(
    std::span<const RankView> views,
    milliseconds stalled_after) {
  const auto stuck = stuck_groups(views);
  std::string text;
  std::string group;
  for (const RankView& view : views) {
    if (view.seen && view.state.status == RankStatus::troubled) {
      text = fmt::format(
          "rank {} of {} reports: {}; every rank is alive",
          view.state.rank,
          views.size(),
          view.state.message);
      break;
    }
  }
  if (!stuck.empty()) {
    const Stuck& first = stuck.front();
    group = first.group;
    if (text.empty()) {
      text = fmt::format(
          "every rank is alive and reached the same collective, but it does "
          "not finish: check the network between the ranks");
    }
    text += "; " + waiting_text(first);
  }
  if (text.empty()) {
    text = fmt::format(
        "a rank reported a stall of {} that has ended on all ranks",
        seconds(stalled_after));
  }
  return {ErrorCode::timeout, 0, with_table(std::move(text), views, group)};
}

}  // namespace

std::string serialize(const Verdict& verdict) {
  return fmt::format(
      "{}\t{}\t{}",
      static_cast<int>(verdict.code),
      verdict.num_missing,
      verdict.text);
}

Verdict parse_verdict(std::string_view text) {
  Verdict verdict;
  const std::size_t first = text.find('\t');
  const std::size_t second = text.find('\t', first + 1);
  FLATSHARD_CHECK(
      first == 1 && second != std::string_view::npos,
      comm,
      "a published verdict: expected a code, got '{}'",
      text);
  verdict.code = static_cast<ErrorCode>(text[0] - '0');
  verdict.num_missing =
      std::stoi(std::string(text.substr(first + 1, second - first - 1)));
  verdict.text = text.substr(second + 1);
  return verdict;
}

bool waits_for_who_left(std::span<const RankView> views) {
  std::map<std::string_view, std::int64_t> left_after;  // by group
  for (const RankView& view : views) {
    if (view.seen && view.state.status == RankStatus::left) {
      for (const FlightTrack& track : view.state.tracks) {
        const auto at = left_after.try_emplace(track.group, track.num_launched);
        at.first->second = std::min(at.first->second, track.num_launched);
      }
    }
  }
  return std::ranges::any_of(views, [&](const RankView& view) {
    return view.seen && !view.missing && view.waits &&
           std::ranges::any_of(view.state.tracks, [&](const FlightTrack& t) {
             const auto left = left_after.find(t.group);
             return t.pending() != nullptr && left != left_after.end() &&
                    t.pending()->seq >= left->second;
           });
  });
}

Verdict diagnose(
    std::span<const RankView> views,
    std::chrono::milliseconds stalled_after) {
  if (auto verdict = find_failed(views)) {
    return *verdict;
  }
  if (auto verdict = find_missing(views)) {
    return *verdict;
  }
  if (auto verdict = find_difference(views)) {
    return *verdict;
  }
  if (auto verdict = find_diverged(views)) {
    return *verdict;
  }
  if (auto verdict = find_parted(views)) {
    return *verdict;
  }
  if (const auto late = find_latest(views)) {
    return {
        late->rank->state.status == RankStatus::left ? ErrorCode::comm
                                                     : ErrorCode::timeout,
        0,
        with_table(late_text(*late, views.size()), views, late->stuck.group)};
  }
  if (auto verdict = find_held_device(views)) {
    return *verdict;
  }
  return find_trouble(views, stalled_after);
}

}  // namespace flatshard
