#pragma once

#include <c10/core/Device.h>

#include <string>

namespace flatshard {

/// Returns the driver's name of the GPU, e.g. "NVIDIA H100 80GB HBM3".
/// @throws Error{config} for another device than a GPU of a build with CUDA.
std::string cuda_device_name(at::Device device);

}  // namespace flatshard
