#pragma once

#include <string_view>

namespace flatshard {

/// Manifest::state: how many steps the optimizer has done.
inline constexpr std::string_view kOptimizerSteps = "optimizer.num_steps";

}  // namespace flatshard
