#include "flatshard/exchange/row_runs.h"

#include <algorithm>

namespace flatshard {

RunTables::RunTables(
    std::int64_t num_ranks,
    std::int64_t experts_per_rank,
    bool ends_by_rank)
    : num_ends(experts_per_rank * (ends_by_rank ? num_ranks : 1)),
      staying_columns(experts_per_rank + 1),
      arriving_columns(experts_per_rank * num_ranks + 1),
      ends_by_rank(ends_by_rank) {
}

RowRuns::RowRuns(std::span<const int> counts, int num_ranks, int rank)
    : by_rank_(num_ranks), rank_(rank) {
  const std::size_t num_experts = counts.size() / num_ranks;
  const std::size_t local = num_experts / num_ranks;
  for (int r = 0; r < num_ranks; ++r) {
    std::int64_t row = 0;
    for (std::size_t expert = 0; expert < num_experts; ++expert) {
      const int rows = counts[r * num_experts + expert];
      if (expert / local == static_cast<std::size_t>(rank)) {
        by_rank_[r].push_back({.at_home = row, .rows = rows});
      }
      row += rows;
    }
    most_routed_ = std::max(most_routed_, row);
    if (r == rank) {
      num_routed_ = row;
    }
  }
  for (std::size_t expert = 0; expert < local; ++expert) {
    for (std::vector<Run>& runs : by_rank_) {
      runs[expert].at_experts = num_arriving_;
      num_arriving_ += runs[expert].rows;
    }
  }
}

std::int64_t RowRuns::stay_begin() const {
  return by_rank_[rank_].front().at_home;
}

std::int64_t RowRuns::stay_end() const {
  const Run& last = by_rank_[rank_].back();
  return last.at_home + last.rows;
}

void RowRuns::write(const RunTables& tables, std::span<int> to) const {
  const std::size_t num_ranks = by_rank_.size();
  const std::span<int> ends = to.first(tables.num_ends);
  const std::span<int> staying =
      to.subspan(ends.size(), 2 * tables.staying_columns);
  const std::span<int> arriving =
      to.subspan(ends.size() + staying.size(), 2 * tables.arriving_columns);
  for (std::size_t expert = 0; expert < by_rank_[rank_].size(); ++expert) {
    const Run& stays = by_rank_[rank_][expert];
    staying[expert] = static_cast<int>(stays.at_home);
    staying[tables.staying_columns + expert] =
        static_cast<int>(stays.at_experts);
    for (std::size_t r = 0; r < num_ranks; ++r) {
      const Run& run = by_rank_[r][expert];
      const std::size_t which = expert * num_ranks + r;
      arriving[which] = static_cast<int>(run.at_experts);
      arriving[tables.arriving_columns + which] = static_cast<int>(run.at_home);
      ends[tables.ends_by_rank ? which : expert] =
          static_cast<int>(run.at_experts + run.rows);
    }
  }
  staying[tables.staying_columns - 1] = static_cast<int>(stay_end());
  arriving[tables.arriving_columns - 1] = static_cast<int>(num_arriving_);
}

}  // namespace flatshard
