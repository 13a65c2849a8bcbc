#include "flatshard/train/device.h"

#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/train/peak_flops.h"

namespace flatshard {

at::Device choose_device(const std::string& name, const RankEnvironment& env) {
  const int gpus = name == "cpu" ? 0 : num_cuda_devices();
  if (name == "cpu" || (name == "auto" && gpus == 0)) {
    return at::kCPU;
  }
  FLATSHARD_CHECK(
      name == "auto" || name == "cuda",
      config,
      "--device: expected auto, cpu or cuda, got '{}'",
      name);
  FLATSHARD_CHECK(
      env.local_rank < gpus,
      config,
      "expected a GPU for local rank {}, got {} GPUs; start fewer ranks or use "
      "--device cpu",
      env.local_rank,
      gpus);
  const at::Device gpu(
      at::kCUDA,
      static_cast<c10::DeviceIndex>(env.local_rank));
  check_gpu(gpu);
  return gpu;
}

std::optional<double> peak_flops(const Config& config, at::Device device) {
  if (device.is_cuda() && config.precision.compute == "bfloat16") {
    return dense_bf16_flops(cuda_device_name(device));
  }
  return std::nullopt;
}

}  // namespace flatshard
