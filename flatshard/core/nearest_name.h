#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// Returns how many insertions, deletions, replacements and swaps of adjacent
/// characters turn `a` into `b` (optimal string alignment distance).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    last[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t cost = a[i - 1] == b[j - 1] ? 0 : 1;
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + cost});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

/// Returns the candidate closest to `name`, the first one on a tie; empty when
/// there are no candidates.
template <class Range>
std::string nearest_name(std::string_view name, const Range& candidates) {
  std::string best;
  std::size_t best_distance = static_cast<std::size_t>(-1);
  for (const auto& candidate : candidates) {
    const std::size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = std::string(candidate);
    }
  }
  return best;
}

/// Returns whether `shorter` has letters of `longer` in their order, its first
/// one too (bf16 of bfloat16), or is a part of it.
inline bool abbreviates(std::string_view shorter, std::string_view longer) {
  if (longer.find(shorter) != longer.npos) {
    return true;
  }
  std::size_t at = 0;
  for (const char c : longer) {
    at += at < shorter.size() && shorter[at] == c ? 1 : 0;
  }
  return at == shorter.size() && shorter.front() == longer.front();
}

/// Returns the candidate that a typing mistake may have turned into `name`: at
/// most a third of its letters differ. Otherwise the only one that `name`
/// abbreviates, or that abbreviates it (`warmup` and `warmup_steps`). Empty if
/// neither is found. It serves errors such as "unknown X, did you mean Y?".
template <class Range>
std::string near_name(std::string_view name, const Range& candidates) {
  constexpr std::size_t kShortest = 4;  // letters that make a name
  const std::string nearest = nearest_name(name, candidates);
  const std::size_t longest = std::max(name.size(), nearest.size());
  if (!nearest.empty() &&
      edit_distance(name, nearest) <= std::max<std::size_t>(1, longest / 3)) {
    return nearest;
  }
  std::string only;
  for (const auto& candidate : candidates) {
    const std::string_view other(candidate);
    if (std::min(name.size(), other.size()) < kShortest ||
        !(name.size() < other.size() ? abbreviates(name, other)
                                     : abbreviates(other, name))) {
      continue;
    }
    if (!only.empty()) {
      return {};
    }
    only = std::string(other);
  }
  return only;
}

}  // namespace flatshard
