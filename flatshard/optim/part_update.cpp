#include "flatshard/optim/part_update.h"

#include "flatshard/optim/moments.h"

#include <algorithm>
#include <utility>

namespace flatshard {

PartUpdate::PartUpdate(const ParamGroup& group, UpdatePart part)
    : group_(&group), part_(std::move(part)), row_of_(part_.row_of) {
  set_ranges();
}

bool PartUpdate::contains(const std::string& name) const {
  const std::vector<GroupParameter>& parameters = group_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].names.front() == name &&
        part_.row_of[i] != UpdateRange::kSkipped) {
      return true;
    }
  }
  return false;
}

void PartUpdate::begin(
    const std::vector<bool>& skipped,
    std::vector<std::int64_t>& updates) {
  rows_.clear();
  std::vector<std::int32_t> row_of = part_.row_of;
  for (std::size_t i = 0; i < row_of.size(); ++i) {
    if (row_of[i] == UpdateRange::kSkipped) {
      continue;
    }
    if (!skipped.empty() && skipped.at(i)) {
      row_of[i] = UpdateRange::kSkipped;
      continue;
    }
    const Row row{
        .parameter_group = part_.rows[row_of[i]],
        .updates = ++updates[i]};
    const auto found = std::ranges::find(rows_, row);
    row_of[i] = static_cast<std::int32_t>(found - rows_.begin());
    if (found == rows_.end()) {
      rows_.push_back(row);
    }
  }
  if (row_of != row_of_) {
    row_of_ = std::move(row_of);
    set_ranges();
  }
}

void PartUpdate::set_ranges() {
  const ShardPieces pieces = shard_pieces(*group_);
  flat.ranges = update_ranges(pieces, row_of_);
  if (part_.is_partial) {
    flat.runs = update_runs(pieces, part_.row_of, row_of_);
  } else {
    flat.upload_ranges(group_->weights().main().local().device());
  }
}

void PartUpdate::set_stochastic_rounding(std::uint64_t seed) {
  check_stochastic_rounding(group_->name(), part_.algorithm, part_.is_partial);
  flat.rounding_ranges = rounding_ranges(*group_, seed);
  flat.upload_ranges(group_->weights().main().local().device());
}

bool PartUpdate::is_whole() const {
  return std::ranges::find(row_of_, UpdateRange::kSkipped) == row_of_.end();
}

std::vector<ParameterValues> PartUpdate::values(
    const ParameterGroups& groups) const {
  std::vector<ParameterValues> values;
  for (const Row& row : rows_) {
    values.push_back(groups.groups[row.parameter_group].values);
  }
  return values;
}

void PartUpdate::set_rows(
    const UpdateAlgorithm& algorithm,
    const ParameterGroups& groups,
    double lr) {
  flat.rows.clear();
  for (const auto& [group, updates] : rows_) {
    const ParameterValues& values = groups.groups[group].values;
    flat.rows.push_back(algorithm.row(values, lr * values.lr_mult, updates));
  }
}

}  // namespace flatshard
