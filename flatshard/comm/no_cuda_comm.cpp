// Stands in for cuda_*.cpp in a build without CUDA.
#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard::detail {

std::shared_ptr<Communicator> make_nccl_communicator(
    StoreHandle /*store*/,
    int /*rank*/,
    int /*size*/,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& /*options*/) {
  FLATSHARD_THROW(
      config,
      "communicator '{}': device '{}' needs NCCL, and this build has no CUDA; "
      "use device cpu or build with -DFLATSHARD_CUDA=on",
      name,
      device.str());
}

std::shared_ptr<TorchGroup> make_nccl_torch_group(
    const StoreHandle& /*store*/,
    const TorchGroupOptions& options) {
  FLATSHARD_THROW(
      config,
      "group '{}': device '{}' needs NCCL, and this build has no CUDA; use "
      "device cpu or build with -DFLATSHARD_CUDA=on",
      options.name,
      options.device.str());
}

void cuda_sum_rows(
    const at::Tensor& /*out*/,
    const at::Tensor& /*rows*/,
    int /*rank*/,
    const at::Tensor& /*own*/,
    double /*scale*/) {
  FLATSHARD_THROW(
      config,
      "sums on a GPU require CUDA, and this build has none; build with "
      "-DFLATSHARD_CUDA=on");
}

bool cuda_adds(const at::Tensor& /*into*/, const at::Tensor& /*from*/) {
  return false;
}

void cuda_add_scaled(
    const at::Tensor& /*into*/,
    const at::Tensor& /*from*/,
    double /*scale*/,
    bool /*add*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace flatshard::detail
