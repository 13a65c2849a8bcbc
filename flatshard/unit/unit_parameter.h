#pragma once

#include "flatshard/group/param_group.h"
#include "flatshard/unit/parameter_storage.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// One parameter of a unit.
struct UnitParameter {
  std::string name;
  at::Tensor tensor;  ///< owned by the module
  std::size_t group = 0;
  std::int64_t index = 0;  ///< in the group's layout
  ParameterStorage storage;

  /// Returns the offset in bytes from the start of the group's flat buffer of
  /// `dtype`.
  std::int64_t offset(const ParamGroup& group, at::ScalarType dtype) const {
    return group.layout().tensor_offset(index) *
           static_cast<std::int64_t>(c10::elementSize(dtype));
  }
};

using UnitGroups = std::vector<std::unique_ptr<ParamGroup>>;
using UnitParameters = std::vector<UnitParameter>;

}  // namespace flatshard
