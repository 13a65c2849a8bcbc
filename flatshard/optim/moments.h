#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/parameter_rules.h"
#include "flatshard/optim/state_codes.h"
#include "flatshard/optim/state_format.h"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

/// A parameter with this attribute, "float32", keeps float32 states where the
/// others have int8. Embeddings have it: their rows are updated rarely, and
/// differ in size.
inline constexpr const char* kStateDtypeAttribute = "state_dtype";

/// The layout alignment of groups with int8 states: no block is split.
inline constexpr std::int64_t kInt8Alignment = kStateBlock;

/// Returns the format of a parameter's states. It depends on the full
/// parameter, so it is the same on every mesh.
/// @param asked  for the optimizer.
StateFormat state_format_of(const GroupParameter& parameter, StateFormat asked);

/// Checks that the shards of all ranks can have states in these formats, so
/// that all ranks throw, or none.
/// @param formats  of the parameters: see state_format_of.
/// @throws Error{config} naming a parameter with int8 states whose blocks are
///   split, by a shard of some rank or by a slice of tensor parallelism.
void check_state_formats(
    const TrainedGroup& group,
    const std::vector<StateFormat>& formats);

/// Returns the formats of the states over a rank's shard.
/// @param formats  of the parameters.
/// @param pieces   of each parameter, in a shard of `numel` elements.
std::vector<StateRange> moment_ranges(
    const std::vector<StateFormat>& formats,
    const std::vector<std::vector<Piece>>& pieces,
    std::int64_t numel);

/// AdamW's two states of one group. Both states of a parameter have one format.
class Moments {
 public:
  /// Zeros.
  /// @param group   must outlive this.
  /// @param asked   for each parameter of the group.
  /// @param device  of the states.
  /// @throws Error{config} as check_state_formats.
  Moments(
      const ParamGroup& group,
      const std::vector<StateFormat>& asked,
      at::Device device);

  /// Calls `visit` with each tensor of the states. `visit` may replace it.
  void visit(const std::function<void(at::Tensor&)>& visit);
  /// Makes `update` work on these states.
  void set_on(FlatUpdate& update) const;

  /// Returns their names and tensors. With one format these are exp_avg and
  /// exp_avg_sq, as long as the shard.
  std::vector<std::pair<std::string, at::Tensor>> tensors() const;
  /// Returns this rank's part of each parameter's states, for checkpoints:
  /// exp_avg and exp_avg_sq; of int8 states also exp_avg.scale and
  /// exp_avg_sq.scale.
  std::vector<std::pair<std::string, std::vector<NamedShard>>> shards() const;

 private:
  /// The states of one of ParamGroup::main_shards.
  struct Part {
    StateFormat format = StateFormat::float32;
    std::int64_t at = 0;  ///< first element among those of its format
  };

  bool is_flat() const {
    return ranges_.size() == 1 && ranges_.front().format != StateFormat::int8;
  }
  std::vector<NamedShard> values_of(const StateTensors& state) const;
  std::vector<NamedShard> scales_of(const StateTensors& state) const;

  const ParamGroup* group_;
  std::vector<StateRange> ranges_;
  at::Tensor device_ranges_;
  std::vector<Part> parts_;  ///< in the order of main_shards
  StateTensors exp_avg_;
  StateTensors exp_avg_sq_;
};

/// Checks that the shards of all ranks can be rounded stochastically.
/// @throws Error{config} naming a parameter that shards of some rank split
///   inside four elements. So all ranks of the group throw, or none.
void check_rounding(const TrainedGroup& group);

/// Returns the parts of a group's parameters, for stochastic rounding.
/// @throws Error{config} as check_rounding.
std::vector<RoundingRange> rounding_ranges(
    const ParamGroup& group,
    std::uint64_t seed);

}  // namespace flatshard
