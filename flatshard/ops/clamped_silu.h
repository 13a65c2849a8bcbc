#pragma once

namespace flatshard::nn {

// The constants of GateActivation::clamped_silu, shared by the CPU, kernels and
// configurations.
constexpr double kClampedSiluFactor = 1.702;
constexpr double kClampedSiluLimit = 7.0;

}  // namespace flatshard::nn
