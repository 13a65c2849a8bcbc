#pragma once

#include "flatshard/layout/placement.h"

namespace flatshard::testing {

inline const Placement kR = Placement::replicate();
inline const Placement kS = Placement::shard();
inline const Placement kP = Placement::partial(ReduceOp::avg);

}  // namespace flatshard::testing
