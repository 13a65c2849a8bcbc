#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/optim/parameter_rules.h"
#include "flatshard/optim/update_step.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

// How an optimizer divides a group: the algorithm of each element of a rank's
// shard, and its states. They follow from the description of the group, so the
// optimizer and the planner share these functions.
namespace flatshard {

/// The optimizer's shard of a group on one rank.
struct ShardPieces {
  std::vector<std::vector<Piece>> of_parameters;
  std::int64_t numel = 0;  ///< with padding
};
ShardPieces shard_pieces(const ParamGroup& group);
/// @param coordinate  of the rank, in the group's mesh.
ShardPieces shard_pieces(
    const GroupPlan& group,
    std::span<const std::int64_t> coordinate);

/// The parameters of one group that use one algorithm.
struct UpdatePart {
  Algorithm algorithm = Algorithm::adamw;
  std::vector<std::size_t> rows;     ///< the parameter group of each row
  std::vector<std::int32_t> row_of;  ///< of each parameter, or kSkipped
  /// Other parameters of the group are not updated, or by another part, so
  /// states have the elements of this part only.
  bool is_partial = false;
};

/// Returns the parts of a group, by algorithm.
/// @param of_parameters  of the group: see ParameterGroups.
/// @throws Error{config} when AdamW has states in other formats than float32,
///   but does not update all parameters of the group.
std::vector<UpdatePart> update_parts(
    const TrainedGroup& group,
    const std::vector<std::size_t>& of_parameters,
    const ParameterGroups& groups);

/// Checks that the main weights of a group can be rounded stochastically.
/// @param name  of the group, for errors.
/// @throws Error{config} when they cannot.
void check_stochastic_rounding(
    std::string_view name,
    Algorithm algorithm,
    bool is_partial);

/// Returns the runs of equal rows over the flat shard, where skipped parameters
/// have the row kSkipped. Padding has the row of the elements before it: it is
/// zero and stays zero. So all but the last end where a parameter starts.
/// Empty: all of the shard has row 0.
std::vector<UpdateRange> update_ranges(
    const ShardPieces& pieces,
    const std::vector<std::int32_t>& row_of);
/// Returns the runs of the parameters of a part, with states one after another.
/// A run includes the padding after a parameter, so its length is a multiple of
/// the alignment.
/// @param of_part  UpdatePart::row_of.
/// @param row_of   of each parameter in a step, or kSkipped.
std::vector<UpdateRun> update_runs(
    const ShardPieces& pieces,
    const std::vector<std::int32_t>& of_part,
    const std::vector<std::int32_t>& row_of);

/// Returns the values of each row.
std::vector<ParameterValues> values_of(
    const std::vector<std::size_t>& rows,
    const ParameterGroups& groups);

/// Returns the formats of AdamW's states, of each parameter; of another part
/// and where all are float32 nothing.
/// @throws Error{config} as check_state_formats.
std::vector<StateFormat> state_formats(
    const UpdatePart& part,
    const ParameterGroups& groups,
    const TrainedGroup& group);

/// The elements of a shard that a part updates, and their states.
struct PartSize {
  std::int64_t numel = 0;  ///< with padding
  std::int64_t state_nbytes = 0;
};
/// @param formats  state_formats of the part.
/// @param pieces   of a rank of the group.
PartSize size_of(
    const UpdatePart& part,
    const ParameterGroups& groups,
    const std::vector<StateFormat>& formats,
    const ShardPieces& pieces);

}  // namespace flatshard
