#include "flatshard/comm/collective_signature.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "flatshard/layout/placement.h"

namespace flatshard {
namespace {

std::string_view op_name(const CollectiveSignature& s) {
  if (s.kind == CollectiveKind::reduce_scatter ||
      s.kind == CollectiveKind::all_reduce) {
    return s.detail == static_cast<int>(ReduceOp::avg)   ? ", avg"
           : s.detail == static_cast<int>(ReduceOp::max) ? ", max"
                                                         : ", sum";
  }
  return "";
}

// Returns the signature that most ranks have; ties go to the first.
const IssuedCollective& usual(std::span<const IssuedCollective> issued) {
  const IssuedCollective* best = nullptr;
  std::ptrdiff_t best_count = 0;
  for (const IssuedCollective& candidate : issued) {
    const auto count =
        std::count_if(issued.begin(), issued.end(), [&](const auto& i) {
          return i.signature == candidate.signature;
        });
    if (count > best_count) {
      best = &candidate;
      best_count = count;
    }
  }
  return *best;
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

std::string describe(const IssuedCollective& issued) {
  return fmt::format(
      "{}: {}",
      place_of(issued.step, issued.signature),
      describe(issued.signature));
}

}  // namespace

std::string describe(const CollectiveSignature& s) {
  std::string text(to_string(s.kind));
  if (s.kind != CollectiveKind::barrier && s.kind != CollectiveKind::fence) {
    text += fmt::format(
        " of {}{} {}{}",
        s.kind == CollectiveKind::all_to_all ? "rows of " : "",
        s.numel,
        c10::toString(s.dtype),
        op_name(s));
    if (s.kind == CollectiveKind::broadcast) {
      text += fmt::format(" from rank {} of the group", s.detail);
    }
  }
  return text;
}

std::string place_of(std::int64_t step, const CollectiveSignature& signature) {
  return signature.unit.empty()
             ? fmt::format("step {}", step)
             : fmt::format("step {}, unit {}", step, signature.unit);
}

std::optional<std::string> find_difference(
    const std::string& at,
    std::span<const IssuedCollective> issued) {
  if (issued.empty()) {
    return std::nullopt;
  }
  const IssuedCollective& expected = usual(issued);
  std::vector<int> same;
  std::vector<int> others;
  const IssuedCollective* first = nullptr;
  for (const IssuedCollective& i : issued) {
    const bool equal = i.signature == expected.signature;
    (equal ? same : others).push_back(i.rank);
    if (!equal && first == nullptr) {
      first = &i;
    }
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  std::string text = fmt::format(
      "rank {} issues {} at {}: it is in {}, {} in {}",
      first->rank,
      what_differs(expected.signature, first->signature),
      at,
      describe(*first),
      same.size() == 1 ? fmt::format("rank {}", same.front())
                       : fmt::format("ranks {}", rank_list(same)),
      describe(expected));
  if (others.size() > 1) {
    text += fmt::format("; different are ranks {}", rank_list(others));
  }
  return text + "; " + kSameUnitsOnAllRanks;
}

std::string rank_list(std::span<const int> ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) {
      ++end;
    }
    text += text.empty() ? "" : ", ";
    text += end == i ? fmt::format("{}", ranks[i])
                     : fmt::format("{}-{}", ranks[i], ranks[end]);
    i = end + 1;
  }
  return text;
}

}  // namespace flatshard
