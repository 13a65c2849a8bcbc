#pragma once

#include "flatshard/layout/placement.h"

namespace flatshard::testing {

inline const Placement R = Placement::replicate();
inline const Placement S = Placement::shard();
inline const Placement PA = Placement::partial(ReduceOp::avg);
inline const Placement PS = Placement::partial(ReduceOp::sum);

}  // namespace flatshard::testing
