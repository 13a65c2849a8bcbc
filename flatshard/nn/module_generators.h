#pragma once

#include "flatshard/device/generator_states.h"
#include "flatshard/nn/module.h"

namespace flatshard::nn {

/// Returns the states of all generators that a part of `owner` may draw from:
/// the default generators of the CPU and of the inputs' devices, and the
/// explicit ones below `owner`.
GeneratorStates generator_states(Module& owner, const TensorList& inputs);

}  // namespace flatshard::nn
