#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "flatshard/core/error.h"
#include "flatshard/layout/flat_layout.h"

namespace flatshard {
namespace {

constexpr std::int64_t kMaxShardsShown = 16;

/// One line of the map: a tensor, or padding when `tensor` is -1.
struct Entry {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t tensor;
};

std::string tensor_text(const TensorSpec& spec) {
  return fmt::format(
      "{} [{}] {}",
      spec.name,
      fmt::join(spec.shape, ", "),
      spec.granularity.to_string());
}

/// Returns the tensors and padding of the flat space in flat order; padding is
/// split at the ends of segments.
std::vector<Entry> entries_of(const FlatLayout& layout) {
  std::vector<Entry> entries;
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    const std::int64_t begin = layout.tensor_offset(i);
    entries.push_back({begin, begin + layout.tensor_numel(i), i});
  }
  for (const FlatRange& padding : layout.padding_ranges()) {
    for (const Segment& segment : layout.segments()) {
      const std::int64_t begin = std::max(padding.offset, segment.offset);
      const std::int64_t end = std::min(
          padding.offset + padding.numel,
          segment.offset + segment.numel);
      if (begin < end) {
        entries.push_back({begin, end, -1});
      }
    }
  }
  std::stable_sort(entries.begin(), entries.end(), [](auto& a, auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  return entries;
}

bool lies_in(
    const FlatLayout& layout,
    const Entry& entry,
    std::size_t segment_index) {
  if (entry.tensor >= 0) {
    return layout.tensor_segment(entry.tensor) ==
           static_cast<std::int64_t>(segment_index);
  }
  const Segment& segment = layout.segments()[segment_index];
  return entry.begin >= segment.offset &&
         entry.begin < segment.offset + segment.numel;
}

std::string shards_text(const Segment& segment, const Entry& entry) {
  if (entry.begin == entry.end) {
    return "empty";
  }
  const std::int64_t first =
      (entry.begin - segment.offset) / segment.shard_numel;
  const std::int64_t last =
      (entry.end - 1 - segment.offset) / segment.shard_numel;
  return first == last ? fmt::format("shard {}", first)
                       : fmt::format("shards {}-{}", first, last);
}

/// Returns the contents of shard `shard` of one segment, e.g. "a[0, 16) pad 4".
std::string shard_text(
    const FlatLayout& layout,
    const std::vector<Entry>& entries,
    std::size_t segment_index,
    std::int64_t shard) {
  const Segment& segment = layout.segments()[segment_index];
  const std::int64_t begin = segment.offset + shard * segment.shard_numel;
  const std::int64_t end = begin + segment.shard_numel;
  std::vector<std::string> parts;
  for (const Entry& entry : entries) {
    const std::int64_t from = std::max(begin, entry.begin);
    const std::int64_t to = std::min(end, entry.end);
    if (from >= to || !lies_in(layout, entry, segment_index)) {
      continue;
    }
    parts.push_back(
        entry.tensor < 0 ? fmt::format("pad {}", to - from)
                         : fmt::format(
                               "{}[{}, {})",
                               layout.spec(entry.tensor).name,
                               from - entry.begin,
                               to - entry.begin));
  }
  return parts.empty() ? "nothing" : fmt::format("{}", fmt::join(parts, " "));
}

}  // namespace

std::string FlatLayout::describe() const {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(
      out,
      "{} tensors, {} elements in {} shards of {}, padding {} ({:.2f} %)\n",
      num_tensors(),
      numel(),
      num_shards(),
      shard_numel(),
      padding_numel(),
      100 * padding_ratio());
  const std::vector<Entry> entries = entries_of(*this);
  const std::size_t width = std::to_string(numel()).size();
  for (std::size_t k = 0; k < segments_.size(); ++k) {
    const Segment& segment = segments_[k];
    fmt::format_to(
        out,
        "segment {}: {} {}, [{}, {}), shards of {} at local {}\n",
        k,
        segment.whole_tensors ? "whole tensors, alignment" : "granule",
        segment.granule,
        segment.offset,
        segment.offset + segment.numel,
        segment.shard_numel,
        segment.local_offset);
    for (const Entry& entry : entries) {
      if (!lies_in(*this, entry, k)) {
        continue;
      }
      const std::string what =
          entry.tensor < 0
              ? fmt::format("(padding {})", entry.end - entry.begin)
              : tensor_text(spec(entry.tensor));
      fmt::format_to(
          out,
          "  [{:>{}}, {:>{}})  {}: {}\n",
          entry.begin,
          width,
          entry.end,
          width,
          what,
          shards_text(segment, entry));
    }
  }
  const std::int64_t shown = std::min(num_shards(), kMaxShardsShown);
  for (std::int64_t shard = 0; shard < shown; ++shard) {
    std::vector<std::string> parts;
    for (std::size_t k = 0; k < segments_.size(); ++k) {
      parts.push_back(shard_text(*this, entries, k, shard));
    }
    fmt::format_to(out, "shard {}: {}\n", shard, fmt::join(parts, " | "));
  }
  if (shown < num_shards()) {
    fmt::format_to(out, "... {} more shards\n", num_shards() - shown);
  }
  return text;
}

}  // namespace flatshard
