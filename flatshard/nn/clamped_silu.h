#pragma once

namespace flatshard::nn {

// The constants of GateActivation::clamped_silu, with which the CPU, kernels
// and configurations agree.
constexpr double kClampedSiluFactor = 1.702;
constexpr double kClampedSiluLimit = 7.0;

}  // namespace flatshard::nn
