#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/core/init_spec.h"
#include "flatshard/group/float8_format.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/group/parameter_placement.h"
#include "flatshard/group/precision.h"

namespace flatshard {

/// One parameter, from the module tree to its group.
struct GroupParameter {
  std::vector<std::string> names;  ///< the main name first
  /// The shape of this rank's tensor as stored and sharded along its first
  /// dimension. `tensor` may show its dimensions in another order.
  std::vector<std::int64_t> shape;
  /// Set values differ from the model's.
  ParameterPlacement placement;
  /// Absent: the value in ParamGroupOptions.
  std::optional<Precision> precision = std::nullopt;
  /// Absent: the value in ParamGroupOptions.
  std::optional<Float8Format> float8 = std::nullopt;
  /// Absent: as `tensor` requires a gradient. A parameter that is frozen for a
  /// while may stay in a group that is trained.
  std::optional<bool> trainable = std::nullopt;
  /// Parameters of different numbers share no group.
  std::int64_t apart = 0;
  /// See ParamGroupOptions.
  bool has_weights = true;
  InitSpec init;
  /// Values to start from, the same on every rank; undefined: `init` draws.
  at::Tensor values;
  std::map<std::string, std::string> attributes;
  /// No module has it any more: checkpoints leave it out.
  bool dropped = false;
  /// Ranks outside the model's mesh with the same part:
  /// ParamGroup::set_part.
  Replicas outside;
  /// The tensor that modules compute with; may be on meta. make_unit_contents
  /// moves it into the unit. Its strides belong to `shape` in some order of
  /// dimensions: a tensor that is split along a dimension other than its first
  /// is stored with that dimension first.
  at::Tensor tensor;

  /// Returns the part of a larger tensor that this is; all of it by default.
  TensorSlice slice() const { return placement.slice.value_or(TensorSlice()); }
  /// Returns the shape of the larger tensor.
  std::vector<std::int64_t> whole_shape() const {
    return slice().whole_shape(shape);
  }
};

}  // namespace flatshard
