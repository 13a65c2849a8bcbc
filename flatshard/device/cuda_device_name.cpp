#include <cuda_runtime_api.h>

#include "flatshard/core/error.h"
#include "flatshard/device/device_name.h"

namespace flatshard {

std::string cuda_device_name(at::Device device) {
  FLATSHARD_CHECK(
      device.is_cuda(),
      config,
      "expected a GPU, got device '{}'",
      device.str());
  cudaDeviceProp properties;
  const cudaError_t status = cudaGetDeviceProperties(
      &properties,
      device.has_index() ? device.index() : 0);
  FLATSHARD_CHECK(
      status == cudaSuccess,
      cuda,
      "device '{}': {}",
      device.str(),
      cudaGetErrorString(status));
  return properties.name;
}

}  // namespace flatshard
