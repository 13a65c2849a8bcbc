#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flatshard {

/// Numbers that kernels read of RowRuns, one table after the other.
struct RunTables {
  /// @param ends_by_rank  ends of each run, instead of ends of each expert
  RunTables(
      std::int64_t num_ranks,
      std::int64_t experts_per_rank,
      bool ends_by_rank);

  std::int64_t num_ends;  ///< [num_ends]: where rows of an expert here end
  /// [2, columns]: first row at home and at the experts of each run that stays.
  std::int64_t staying_columns;
  /// [2, columns]: first row at the experts and at home of each run that
  /// arrives, by expert and then by rank. In both, [0, columns - 1] is where
  /// the last run ends.
  std::int64_t arriving_columns;
  bool ends_by_rank;

  std::int64_t numel() const {
    return num_ends + 2 * staying_columns + 2 * arriving_columns;
  }
};

/// The rows that arrive at the experts of one rank. On the source rank (where
/// they were routed) rows are ordered by expert. At the experts they are
/// ordered by expert, too, and by rank within one expert. The rows that one
/// rank routed to one expert are a run.
class RowRuns {
 public:
  struct Run {
    std::int64_t at_home = 0;     ///< first row among its rank's rows
    std::int64_t at_experts = 0;  ///< first row among those that arrive here
    std::int64_t rows = 0;
  };

  /// Makes runs of no rank.
  RowRuns() = default;
  /// @param counts  [num_ranks * experts] rows that each rank routes to each
  ///   expert. Rank r has experts from r * experts / num_ranks on.
  /// @param rank    this one
  RowRuns(std::span<const int> counts, int num_ranks, int rank);

  /// Returns the runs that `rank` routed, one for each expert here.
  std::span<const Run> of(int rank) const { return by_rank_[rank]; }
  /// Returns the number of rows that this rank routed. Rows [stay_begin,
  /// stay_end) among them are for its own experts.
  std::int64_t num_routed() const { return num_routed_; }
  std::int64_t stay_begin() const;
  std::int64_t stay_end() const;
  /// Returns the most that any rank routed.
  std::int64_t most_routed() const { return most_routed_; }
  /// Returns the number of rows that arrive here, this rank's own included.
  std::int64_t num_arriving() const { return num_arriving_; }

  /// @param to  [tables.numel()]
  void write(const RunTables& tables, std::span<int> to) const;

 private:
  std::vector<std::vector<Run>> by_rank_;
  int rank_ = 0;
  std::int64_t num_routed_ = 0;
  std::int64_t most_routed_ = 0;
  std::int64_t num_arriving_ = 0;
};

}  // namespace flatshard
