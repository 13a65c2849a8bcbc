#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "flatshard/launch/environment.h"

namespace flatshard {

/// Returns the device of --device: "cpu", "cuda" or "auto" (a GPU when there is
/// one for this local rank). @throws Error{config} when there is no such
/// device.
at::Device choose_device(const std::string& name, const RankEnvironment& env);

/// Peak of a rank's device in FLOP/s for the matmuls of this run, for mfu;
/// unset if it is unknown.
/// @param compute  the dtype of the matmuls.
std::optional<double> peak_flops(at::ScalarType compute, at::Device device);

}  // namespace flatshard
