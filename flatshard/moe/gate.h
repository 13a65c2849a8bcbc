#pragma once

#include "flatshard/ops/gate_activation.h"

namespace flatshard::nn {

/// How to multiply activated rows of gate by rows of up.
struct Gate {
  GateActivation activation;
  bool in_turn;  ///< the columns of gate and up; else all of gate are first
};

}  // namespace flatshard::nn
