#include "flatshard/flight/state.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "flatshard/core/error.h"
#include "flatshard/core/process.h"

namespace flatshard {
namespace {

// Fields are separated by tabs, records by newlines; free text has neither.
std::string plain(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c == '\t' || c == '\n' || c == '\r') {
      c = ' ';
    }
  }
  return result;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

template <class T>
T number(std::string_view text) {
  T value{};
  const auto [stop, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  FLATSHARD_CHECK(
      error == std::errc() && stop == text.data() + text.size(),
      comm,
      "a rank's published state: expected a number, got '{}'; do all ranks run "
      "the same version?",
      text);
  return value;
}

void check_fields(const std::vector<std::string_view>& fields, std::size_t n) {
  FLATSHARD_CHECK(
      fields.size() == n,
      comm,
      "a rank's published state: expected {} fields, got {}; do all ranks run "
      "the same version?",
      n,
      fields.size());
}

}  // namespace

std::string_view to_string(CollectiveState state) {
  switch (state) {
    case CollectiveState::scheduled:
      return "scheduled";
    case CollectiveState::started:
      return "started";
    case CollectiveState::completed:
      return "completed";
  }
  return "unknown";
}

const FlightEntry* FlightTrack::find(std::int64_t seq) const {
  const auto at =
      std::find_if(entries.begin(), entries.end(), [&](const FlightEntry& e) {
        return e.seq == seq;
      });
  return at == entries.end() ? nullptr : &*at;
}

const FlightEntry* FlightTrack::pending() const {
  const auto at =
      std::find_if(entries.begin(), entries.end(), [](const FlightEntry& e) {
        return e.state != CollectiveState::completed;
      });
  return at == entries.end() ? nullptr : &*at;
}

const FlightTrack* FlightState::find(std::string_view group) const {
  const auto at =
      std::find_if(tracks.begin(), tracks.end(), [&](const FlightTrack& t) {
        return t.group == group;
      });
  return at == tracks.end() ? nullptr : &*at;
}

FlightPlace FlightState::current(std::string_view group) const {
  const auto pending_of = [](const FlightTrack* track) -> FlightPlace {
    return {track, track != nullptr ? track->pending() : nullptr};
  };
  FlightPlace best = pending_of(find(group));
  if (best.entry != nullptr) {
    return best;
  }
  for (const FlightTrack& track : tracks) {
    const FlightPlace other = pending_of(&track);
    if (other.entry != nullptr &&
        (best.entry == nullptr || other.entry->age_ms > best.entry->age_ms)) {
      best = other;
    }
  }
  if (best.entry != nullptr) {
    return best;
  }
  const FlightTrack* own = find(group);
  if (own != nullptr && !own->entries.empty()) {
    return {own, &own->entries.back()};
  }
  for (const FlightTrack& track : tracks) {
    if (!track.entries.empty() &&
        (best.entry == nullptr ||
         track.entries.back().age_ms < best.entry->age_ms)) {
      best = {&track, &track.entries.back()};
    }
  }
  return best;
}

std::string serialize(const FlightState& state) {
  std::string text = fmt::format(
      "R\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n",
      state.rank,
      plain(state.host),
      state.pid,
      plain(state.process_space),
      state.process_start,
      state.beat,
      static_cast<int>(state.status),
      plain(state.message),
      state.step,
      state.dump,
      state.saw_leader_leave ? 1 : 0);
  for (const FlightTrack& track : state.tracks) {
    text += fmt::format(
        "T\t{}\t{}\t{}\t{}\n",
        plain(track.group),
        plain(track.name),
        track.num_launched,
        track.num_queued);
    for (const FlightCheckpoint& c : track.checkpoints) {
      text += fmt::format("C\t{}\t{}\n", c.seq, c.hash);
    }
    for (const FlightEntry& e : track.entries) {
      text += fmt::format(
          "E\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n",
          e.seq,
          static_cast<int>(e.signature.kind),
          e.signature.numel,
          static_cast<int>(e.signature.dtype),
          e.signature.detail,
          plain(e.signature.unit),
          e.step,
          static_cast<int>(e.state),
          e.age_ms);
    }
  }
  return text;
}

FlightState parse_flight_state(std::string_view text) {
  FlightState state;
  for (const std::string_view line : split(text, '\n')) {
    if (line.empty()) {
      continue;
    }
    const auto f = split(line, '\t');
    if (f[0] == "R") {
      check_fields(f, 12);
      state.rank = number<int>(f[1]);
      state.host = f[2];
      state.pid = number<std::int64_t>(f[3]);
      state.process_space = f[4];
      state.process_start = number<std::int64_t>(f[5]);
      state.beat = number<std::int64_t>(f[6]);
      state.status = static_cast<RankStatus>(number<int>(f[7]));
      state.message = f[8];
      state.step = number<std::int64_t>(f[9]);
      state.dump = number<std::int64_t>(f[10]);
      state.saw_leader_leave = f[11] == "1";
    } else if (f[0] == "T") {
      check_fields(f, 5);
      state.tracks.push_back(
          {.group = std::string(f[1]),
           .name = std::string(f[2]),
           .num_launched = number<std::int64_t>(f[3]),
           .num_queued = number<std::int64_t>(f[4])});
    } else {
      FLATSHARD_CHECK(
          !state.tracks.empty(),
          comm,
          "a rank's published state: expected a rank and a communicator first, "
          "got '{}'",
          line);
      if (f[0] == "C") {
        check_fields(f, 3);
        state.tracks.back().checkpoints.push_back(
            {number<std::int64_t>(f[1]), number<std::uint64_t>(f[2])});
        continue;
      }
      check_fields(f, 10);
      state.tracks.back().entries.push_back(
          {.seq = number<std::int64_t>(f[1]),
           .signature =
               {.kind = static_cast<CollectiveKind>(number<int>(f[2])),
                .numel = number<std::int64_t>(f[3]),
                .dtype = static_cast<at::ScalarType>(number<int>(f[4])),
                .detail = number<int>(f[5]),
                .unit = std::string(f[6])},
           .step = number<std::int64_t>(f[7]),
           .state = static_cast<CollectiveState>(number<int>(f[8])),
           .age_ms = number<std::int64_t>(f[9])});
    }
  }
  return state;
}

FlightState this_process(int rank) {
  FlightState state;
  state.rank = rank;
  state.host = host_name();
  state.pid = ::getpid();
  std::error_code ignored;
  const auto pid_namespace =
      std::filesystem::read_symlink("/proc/self/ns/pid", ignored);
  state.process_space = boot_id() + "/" + pid_namespace.string();
  state.process_start = process_stat(state.pid).start_ticks;
  return state;
}

ProcessState process_state(const FlightState& state) {
  static const FlightState self = this_process(0);
  if (self.process_start == 0 || state.process_start == 0 ||
      state.process_space != self.process_space) {
    return ProcessState::unknown;
  }
  const ProcessStat now = process_stat(state.pid);
  if (now.state == 0 || now.start_ticks != state.process_start ||
      now.state == 'Z' || now.state == 'X') {
    return ProcessState::gone;
  }
  return now.state == 'T' || now.state == 't' ? ProcessState::stopped
                                              : ProcessState::running;
}

}  // namespace flatshard
