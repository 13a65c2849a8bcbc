#include "flatshard/diagnostics/machine.h"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>

#include "flatshard/device/capability.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/diagnostics/cuda_facts.h"

namespace flatshard {
namespace {

std::string gib(double nbytes) {
  return fmt::format("{:.0f} GiB", nbytes / (1 << 30));
}

// "NVLink to 1, 2; copies through the host to 3".
std::string describe_peers(int gpu, int num_gpus) {
  std::string text;
  for (const auto& [link, words] :
       {std::pair{detail::PeerLink::nvlink, "NVLink to"},
        {detail::PeerLink::pcie, "peer access over PCIe to"},
        {detail::PeerLink::none, "copies through the host to"}}) {
    std::string found;
    for (int other = 0; other < num_gpus; ++other) {
      if (other != gpu && detail::cuda_peer_link(gpu, other) == link) {
        found += fmt::format("{}{}", found.empty() ? " " : ", ", other);
      }
    }
    if (!found.empty()) {
      text += (text.empty() ? "" : "; ") + std::string(words) + found;
    }
  }
  return text;
}

}  // namespace

std::vector<Fact> build_facts() {
  std::vector<Fact> facts = {{"torch", TORCH_VERSION}};
  const auto more = detail::cuda_library_facts();
  facts.insert(facts.end(), more.begin(), more.end());
  facts.push_back(
      {"CUDA code for",
       built_for_gpus().empty()
           ? "no GPU (built with FLATSHARD_CUDA=off, or without nvcc)"
           : std::string(built_for_gpus())});
  return facts;
}

Fact host_fact() {
  utsname host{};
  ::uname(&host);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<double>(::sysconf(_SC_PAGESIZE));
  return {
      "host",
      fmt::format(
          "{} {}, {} {}, {} threads, {}",
          host.sysname,
          host.release,
          host.machine,
          host.nodename,
          std::thread::hardware_concurrency(),
          gib(memory))};
}

std::vector<Fact> machine_facts() {
  std::vector<Fact> facts = {host_fact()};
  const auto driver = detail::cuda_driver_facts();
  facts.insert(facts.end(), driver.begin(), driver.end());
  const int num_gpus = num_cuda_devices();
  for (int i = 0; i < num_gpus; ++i) {
    const at::Device gpu(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    facts.push_back(
        {fmt::format("GPU {}", i),
         fmt::format(
             "{}, {}, sm_{}{}",
             cuda_device_name(gpu),
             gib(detail::cuda_memory_nbytes(gpu)),
             compute_capability(gpu),
             num_gpus > 1 ? ", " + describe_peers(i, num_gpus) : "")});
  }
  if (const char* const text = std::getenv("FLATSHARD_PRETEND_SM")) {
    facts.push_back(
        {"pretended", fmt::format("sm_{} (FLATSHARD_PRETEND_SM)", text)});
  }
  return facts;
}

std::vector<GpuKind> gpu_kinds() {
  std::vector<GpuKind> kinds;
  for (int i = 0; i < num_cuda_devices(); ++i) {
    const at::Device gpu(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    const std::string name = cuda_device_name(gpu);
    const int sm = compute_capability(gpu);
    const auto same = std::ranges::find_if(kinds, [&](const GpuKind& kind) {
      return kind.name == name && kind.sm == sm;
    });
    if (same == kinds.end()) {
      kinds.push_back({.name = name, .sm = sm, .gpus = {i}});
    } else {
      same->gpus.push_back(i);
    }
  }
  return kinds;
}

std::string describe(const GpuKind& kind) {
  std::string gpus;
  for (const int gpu : kind.gpus) {
    gpus += fmt::format("{}{}", gpus.empty() ? "" : ", ", gpu);
  }
  return fmt::format(
      "GPU{} {} ({}, sm_{})\n{}",
      kind.gpus.size() > 1 ? "s" : "",
      gpus,
      kind.name,
      kind.sm,
      describe_gpu_features(kind.sm));
}

std::vector<std::string> try_peer_copies() {
  constexpr std::int64_t kNumel = 1 << 20;
  std::vector<std::string> problems;
  const int num_gpus = num_cuda_devices();
  for (int from = 0; from < num_gpus; ++from) {
    for (int to = 0; to < num_gpus; ++to) {
      if (from == to) {
        continue;
      }
      const auto gpu = [](int index) {
        return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
      };
      try {
        const at::Tensor sent =
            at::arange(kNumel, at::TensorOptions(gpu(from)).dtype(at::kInt)) +
            from;
        if (!at::equal(sent.to(gpu(to)).cpu(), sent.cpu())) {
          problems.push_back(fmt::format(
              "a copy from GPU {} to GPU {} arrives with other bytes: turn off "
              "the IOMMU or PCIe ACS of this host, or set "
              "NCCL_P2P_DISABLE=1 and parallelism.copy_engines = \"none\"",
              from,
              to));
        }
      } catch (const std::exception& error) {
        problems.push_back(fmt::format(
            "a copy from GPU {} to GPU {}: {}",
            from,
            to,
            error.what()));
      }
    }
  }
  return problems;
}

}  // namespace flatshard
