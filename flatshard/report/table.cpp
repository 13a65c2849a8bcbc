#include "flatshard/report/table.h"

#include <algorithm>
#include <cmath>

namespace flatshard::report {
namespace {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

struct Range {
  double mean = kMissing;
  double min = kMissing;
  double max = kMissing;
};

Range range_of(const Table::Column& column, std::size_t from, std::size_t to) {
  Range range;
  double sum = 0;
  std::size_t num_values = 0;
  for (std::size_t i = from; i < to; ++i) {
    if (!std::isnan(column[i])) {
      sum += column[i];
      ++num_values;
      range.min = std::fmin(range.min, column[i]);
      range.max = std::fmax(range.max, column[i]);
    }
  }
  if (num_values > 0) {
    range.mean = sum / static_cast<double>(num_values);
  }
  return range;
}

}  // namespace

void Table::append(std::int64_t step, const Row& row) {
  while (!steps_.empty() && steps_.back() >= step) {
    steps_.pop_back();
    for (auto& [name, column] : columns_) {
      column.pop_back();
    }
  }
  for (const auto& [name, value] : row) {
    columns_.try_emplace(name, steps_.size(), kMissing);
  }
  steps_.push_back(step);
  for (auto& [name, column] : columns_) {
    const auto found = row.find(name);
    column.push_back(found == row.end() ? kMissing : found->second);
  }
}

Downsampled downsample(
    const Table& table,
    std::size_t num_rows,
    const std::vector<std::string>& growing) {
  Downsampled small;
  const std::size_t all = table.num_rows();
  for (std::size_t i = 0; i < num_rows; ++i) {
    const std::size_t from = i * all / num_rows;
    const std::size_t to = (i + 1) * all / num_rows;
    if (from == to) {
      continue;  // there are fewer rows than asked for
    }
    small.steps.push_back(table.steps()[to - 1]);
    for (const auto& [name, column] : table.columns()) {
      const bool grows =
          std::find(growing.begin(), growing.end(), name) != growing.end();
      const Range range =
          grows ? Range{column[to - 1], column[to - 1], column[to - 1]}
                : range_of(column, from, to);
      small.mean[name].push_back(range.mean);
      small.min[name].push_back(range.min);
      small.max[name].push_back(range.max);
    }
  }
  return small;
}

}  // namespace flatshard::report
