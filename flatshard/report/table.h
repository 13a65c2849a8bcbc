#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace flatshard::report {

/// Rows of numbers by ascending step, stored by column. A value that a row does
/// not have, or that is not finite, is NaN.
class Table {
 public:
  using Column = std::vector<double>;
  using Row = std::map<std::string, double>;

  /// Appends a row. It replaces the rows of its step and of later steps,
  /// because those steps were trained again.
  void append(std::int64_t step, const Row& row);

  std::size_t num_rows() const { return steps_.size(); }
  const std::vector<std::int64_t>& steps() const { return steps_; }
  const std::map<std::string, Column>& columns() const { return columns_; }

 private:
  std::vector<std::int64_t> steps_;
  std::map<std::string, Column> columns_;
};

/// A table with fewer rows. Each row represents a range of rows of another
/// table: `mean` has their means, `min` and `max` their extremes. Columns that
/// only grow, such as the time, have the value of the last of these rows in all
/// three.
struct Downsampled {
  std::vector<std::int64_t> steps;
  std::map<std::string, Table::Column> mean;
  std::map<std::string, Table::Column> min;
  std::map<std::string, Table::Column> max;
};

/// Returns `table` in `num_rows` rows of nearly equally many each.
/// @param growing  the columns that only grow.
Downsampled downsample(
    const Table& table,
    std::size_t num_rows,
    const std::vector<std::string>& growing);

}  // namespace flatshard::report
