#pragma once

namespace flatshard {

/// Checks what the launch of a kernel right before reported, as
/// C10_CUDA_KERNEL_LAUNCH_CHECK does.
/// @throws Error{config} that names a GPU without code in this build.
void check_kernel_launch();

}  // namespace flatshard
