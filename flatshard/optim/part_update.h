#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/parameter_rules.h"
#include "flatshard/optim/update_algorithm.h"
#include "flatshard/optim/update_parts.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard {

/// The next update of one part of a group: of its parameters those that have a
/// gradient, with the scalars of their parameter group and of the number of
/// their update.
class PartUpdate {
 public:
  PartUpdate(const ParamGroup& group, UpdatePart part);

  Algorithm algorithm() const { return part_.algorithm; }
  /// Returns whether the parameter of this name belongs to the part.
  bool contains(const std::string& name) const;

  /// Starts the next update: selects the parameters that are not skipped, and
  /// counts it for each of them.
  /// @param skipped  of each parameter of the group; empty: none.
  /// @param updates  of each parameter of the group: how often it was updated.
  void begin(
      const std::vector<bool>& skipped,
      std::vector<std::int64_t>& updates);
  /// Returns whether it updates nothing.
  bool is_empty() const { return rows_.empty(); }
  /// Returns whether it updates all parameters of the group.
  bool is_whole() const;
  /// Returns the row of each parameter of the group, or kSkipped.
  const std::vector<std::int32_t>& row_of() const { return row_of_; }
  /// Returns the values of each row.
  std::vector<ParameterValues> values(const ParameterGroups& groups) const;
  /// Sets `flat.rows`.
  /// @param lr  without ParameterValues::lr_mult.
  void set_rows(
      const UpdateAlgorithm& algorithm,
      const ParameterGroups& groups,
      double lr);

  /// See Optimizer::set_stochastic_rounding.
  void set_stochastic_rounding(std::uint64_t seed);

  FlatUpdate flat;  ///< with the ranges of row_of()

 private:
  /// Parameters of one parameter group that were updated equally often.
  struct Row {
    std::size_t parameter_group = 0;
    std::int64_t updates = 0;  ///< with this one

    bool operator==(const Row&) const = default;
  };
  void set_ranges();

  const ParamGroup* group_;
  UpdatePart part_;
  std::vector<Row> rows_;
  std::vector<std::int32_t> row_of_;
};

}  // namespace flatshard
