#include "flatshard/diagnostics/cuda_facts.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

#include "flatshard/device/stream.h"

namespace flatshard::detail {
namespace {

// 13000 of CUDA is 13.0.
std::string cuda_version(int number) {
  return fmt::format("{}.{}", number / 1000, number % 1000 / 10);
}

// 22803 of NCCL is 2.28.3, and 91002 of cuDNN 9.10.2.
std::string version(long number, int major, int minor) {
  return fmt::format(
      "{}.{}.{}",
      number / major,
      number % major / minor,
      number % minor);
}

// "580.82.07" of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07
// ...".
std::string kernel_module_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::smatch found;
  return std::regex_search(text, found, std::regex(" ([0-9]+\\.[0-9.]+) "))
             ? found[1].str()
             : "unknown";
}

}  // namespace

std::vector<Fact> cuda_library_facts() {
  int runtime = 0;
  int nccl = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  (void)ncclGetVersion(&nccl);
  std::vector<Fact> facts = {
      {"CUDA runtime", cuda_version(runtime)},
      {"NCCL", version(nccl, 10000, 100)},
      {"cuBLASLt",
       version(static_cast<long>(cublasLtGetVersion()), 10000, 100)}};
  if (at::detail::getCUDAHooks().hasCuDNN()) {
    facts.push_back(
        {"cuDNN",
         version(at::detail::getCUDAHooks().versionCuDNN(), 10000, 100)});
  }
  return facts;
}

std::vector<Fact> cuda_driver_facts() {
  int driver = 0;
  const bool known = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  (void)cudaGetLastError();
  if (!known) {
    return {{"driver", "none; training is on the CPU (look at nvidia-smi)"}};
  }
  std::vector<Fact> facts = {
      {"driver",
       fmt::format(
           "{}, for CUDA up to {}",
           kernel_module_version(),
           cuda_version(driver))}};
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (status != cudaSuccess && status != cudaErrorNoDevice) {
    facts.push_back({"GPUs", cudaGetErrorString(status)});
  }
  return facts;
}

double cuda_memory_nbytes(at::Device gpu) {
  cudaDeviceProp properties{};
  (void)cudaGetDeviceProperties(&properties, gpu.index());
  return static_cast<double>(properties.totalGlobalMem);
}

PeerLink cuda_peer_link(int from, int to) {
  int access = 0;
  int atomics = 0;  // NVLink has them, PCIe has not
  (void)cudaDeviceCanAccessPeer(&access, from, to);
  (void)cudaDeviceGetP2PAttribute(
      &atomics,
      cudaDevP2PAttrNativeAtomicSupported,
      from,
      to);
  (void)cudaGetLastError();
  return access == 0    ? PeerLink::none
         : atomics != 0 ? PeerLink::nvlink
                        : PeerLink::pcie;
}

}  // namespace flatshard::detail
