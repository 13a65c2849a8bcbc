#pragma once

#include "flatshard/nn/gate_activation.h"

namespace flatshard::nn {

/// How rows of gate and up become one product.
struct Gate {
  GateActivation activation;
  bool in_turn;  ///< the columns of gate and up; else all of gate are first
};

}  // namespace flatshard::nn
