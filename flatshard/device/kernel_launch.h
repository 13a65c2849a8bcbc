#pragma once

namespace flatshard {

/// Checks what the launch of a kernel right before reported, as
/// C10_CUDA_KERNEL_LAUNCH_CHECK does.
/// @throws Error{config} for a GPU that this build has no code for, by name.
void check_kernel_launch();

}  // namespace flatshard
