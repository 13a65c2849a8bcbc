#include "flatshard/optim/state_ranges.h"

#include <algorithm>
#include <array>

namespace flatshard {

std::vector<StateRange> state_ranges(
    std::vector<StatePart> parts,
    std::int64_t numel) {
  if (parts.empty()) {
    return {{.end = numel}};
  }
  std::ranges::sort(parts, {}, &StatePart::begin);
  parts.front().begin = 0;
  std::array<std::int64_t, 3> counts{};
  std::vector<StateRange> ranges;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto [begin, format] = parts[i];
    const std::int64_t end = i + 1 < parts.size() ? parts[i + 1].begin : numel;
    auto& count = counts[static_cast<std::size_t>(format)];
    if (ranges.empty() || ranges.back().format != format) {
      ranges.push_back({.shift = count - begin, .format = format});
    }
    ranges.back().end = end;
    count += end - begin;
  }
  return ranges;
}

std::int64_t numel_of(
    const std::vector<StateRange>& ranges,
    StateFormat format) {
  std::int64_t numel = 0;
  std::int64_t begin = 0;
  for (const StateRange& range : ranges) {
    numel += range.format == format ? range.end - begin : 0;
    begin = range.end;
  }
  return numel;
}

std::int64_t states_nbytes(const std::vector<StateRange>& ranges) {
  const std::int64_t codes = numel_of(ranges, StateFormat::int8);
  return 2 * (4 * numel_of(ranges, StateFormat::float32) +
              2 * numel_of(ranges, StateFormat::bfloat16) + codes +
              4 * (codes / kStateBlock));
}

}  // namespace flatshard
