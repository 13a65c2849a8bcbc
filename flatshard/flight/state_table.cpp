#include <algorithm>
#include <array>

#include "flatshard/flight/text.h"

namespace flatshard {
namespace {

using std::chrono::milliseconds;

}  // namespace

std::string detail::seconds(std::chrono::milliseconds time) {
  return fmt::format("{:.1f} s", static_cast<double>(time.count()) * 1e-3);
}

std::string detail::at(const FlightTrack& track, std::int64_t seq) {
  return fmt::format("{} #{}", track.name, seq);
}

std::string detail::describe(
    const FlightTrack& track,
    const FlightEntry& entry) {
  return fmt::format(
      "{}: {} ({})",
      place_of(entry.step, entry.signature),
      flatshard::describe(entry.signature),
      at(track, entry.seq));
}

std::string detail::with_table(
    const std::string& headline,
    std::span<const RankView> views,
    std::string_view group) {
  return fmt::format("{}\n{}", headline, flight_table(views, group));
}

std::string flight_table(
    std::span<const RankView> views,
    std::string_view group) {
  constexpr std::size_t kColumns = 9;
  using Row = std::array<std::string, kColumns>;
  struct Line {
    Row row;
    std::vector<int> ranks;
    milliseconds age{0};
  };
  std::vector<Line> lines;
  for (const RankView& view : views) {
    Row row{};
    milliseconds age{0};
    const FlightPlace now = view.state.current(group);
    if (now.entry != nullptr) {
      const CollectiveSignature& s = now.entry->signature;
      row = {
          "",
          std::to_string(now.entry->step),
          s.unit.empty() ? "-" : s.unit,
          std::string(to_string(s.kind)),
          now.track->name,
          std::to_string(now.entry->seq),
          std::to_string(s.numel),
          std::string(c10::toString(s.dtype)),
          std::string(to_string(now.entry->state))};
      age = milliseconds(now.entry->age_ms);
    } else {
      row = {"", "-", "-", "none published", "-", "-", "-", "-", "-"};
    }
    if (view.missing) {
      row[8] += view.seen ? " (missing)" : "never came";
    } else if (view.state.status == RankStatus::left) {
      row[8] += " (ended)";
    } else if (view.state.status == RankStatus::failed) {
      row[8] += " (failed)";
    }
    const auto same =
        std::find_if(lines.begin(), lines.end(), [&](const Line& line) {
          return line.row == row;
        });
    Line& line = same == lines.end() ? lines.emplace_back() : *same;
    line.row = row;
    line.ranks.push_back(view.state.rank);
    line.age = std::max(line.age, age);
  }
  std::array<std::size_t, kColumns> widths{};
  Row header{
      "rank",
      "step",
      "unit",
      "collective",
      "communicator",
      "#",
      "elements",
      "dtype",
      "state"};
  for (std::size_t c = 0; c < kColumns; ++c) {
    widths[c] = header[c].size();
  }
  for (Line& line : lines) {
    line.row[0] = rank_list(line.ranks);
    for (std::size_t c = 0; c < kColumns; ++c) {
      widths[c] = std::max(widths[c], line.row[c].size());
    }
  }
  const auto write = [&](const Row& row, const std::string& age) {
    std::string text = " ";
    for (std::size_t c = 0; c < kColumns; ++c) {
      text += fmt::format(" {:<{}} ", row[c], widths[c]);
    }
    return text + " " + age;
  };
  std::string text = write(header, "for");
  for (const Line& line : lines) {
    text += "\n" + write(line.row, detail::seconds(line.age));
  }
  return text;
}

}  // namespace flatshard
