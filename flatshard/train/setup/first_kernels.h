#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <future>

namespace flatshard {

/// Runs a small matmul and a small attention, and their backwards, on another
/// thread. So a GPU's libraries and kernels are loaded while weights are read,
/// and not in the first step. Does nothing on CPUs.
///
/// @param dtype  of the model's activations
/// @return       its destructor waits for the end. Errors are left to the first
///   step: they occur there again.
std::future<void> load_first_kernels(at::Device device, at::ScalarType dtype);

}  // namespace flatshard
