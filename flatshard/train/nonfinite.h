#pragma once

#include <string>

#include "flatshard/unit/runtime.h"

namespace flatshard {

/// Which gradient is not finite, in the words of the first rank that holds one;
/// the same text on all ranks, empty when none does. Collective; blocks. Call
/// it between the backward and Optimizer::zero_grad.
std::string name_nonfinite_gradient(const Runtime& runtime, Mesh& mesh);

}  // namespace flatshard
