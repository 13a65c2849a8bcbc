#include "flatshard/train/setup/run_device.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/train/metrics/peak_flops.h"

#include <cctype>
#include <filesystem>

namespace flatshard {
namespace {

constexpr const char* kHowToGetCuda = "build it with FLATSHARD_CUDA=on, or "
                                      "install a wheel with cu in its version";

/// Returns whether the kernel has an NVIDIA GPU. Works in CPU builds, where
/// torch cannot be asked.
bool machine_has_gpu() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("nvidia") && name.size() > 6 &&
        std::isdigit(static_cast<unsigned char>(name[6])) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

at::Device choose_device(const std::string& name, const RankEnvironment& env) {
  const int gpus = name == "cpu" ? 0 : num_cuda_devices();
  if (name == "cpu" || (name == "auto" && gpus == 0)) {
    if (name == "auto" && env.rank == 0 && built_for_gpus().empty() &&
        machine_has_gpu()) {
      log_warning(
          "this machine has a GPU and this Flatshard is built for CPUs only; "
          "{}, or use --device cpu",
          kHowToGetCuda);
    }
    return at::kCPU;
  }
  FLATSHARD_CHECK(
      name == "auto" || name == "cuda",
      config,
      "--device: expected auto, cpu or cuda, got '{}'",
      name);
  FLATSHARD_CHECK(
      !built_for_gpus().empty(),
      config,
      "--device cuda: expected CUDA code, got a Flatshard that is built for "
      "CPUs only; {}",
      kHowToGetCuda);
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

std::optional<double> peak_flops(at::ScalarType compute, at::Device device) {
  if (device.is_cuda() && compute == at::kBFloat16) {
    return dense_bf16_flops(cuda_device_name(device));
  }
  return std::nullopt;
}

}  // namespace flatshard
