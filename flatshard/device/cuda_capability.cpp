#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/device_backend.h"
#include "flatshard/device/kernel_launch.h"

namespace flatshard {
namespace detail {

int cuda_compute_capability(at::Device device) {
  const int index =
      device.has_index() ? device.index() : c10::cuda::current_device();
  int major = 0;
  int minor = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  return major * 10 + minor;
}

}  // namespace detail

void check_kernel_launch() {
  const cudaError_t status = cudaPeekAtLastError();
  if (status == cudaErrorNoKernelImageForDevice ||
      status == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();
    // Throws if this GPU does not fit the build. The error below is for a build
    // that should fit.
    check_gpu({at::kCUDA, c10::cuda::current_device()});
    FLATSHARD_THROW(
        cuda,
        "{}: this build of Flatshard has CUDA code for {}; build it again with "
        "FLATSHARD_GPUS=native on a machine with this GPU",
        cudaGetErrorString(status),
        built_for_gpus());
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace flatshard
