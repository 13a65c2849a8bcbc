#pragma once

#include <string>
#include <vector>

// The facts about a build and a machine that `flatshard info`, `flatshard
// doctor` and `python -m flatshard.doctor` print.
namespace flatshard {

struct Fact {
  std::string name;
  std::string value;
};

/// Versions of torch, CUDA's runtime, cuBLASLt, cuDNN and NCCL, and the GPUs
/// that the CUDA code is built for.
std::vector<Fact> build_facts();
/// Returns the host: system, name, threads, memory. Starts no CUDA.
Fact host_fact();
/// Returns the host, the driver, each GPU with its memory and compute
/// capability, and the links between GPUs. Starts CUDA if there is a
/// GPU.
std::vector<Fact> machine_facts();

/// GPUs with one name and compute capability.
struct GpuKind {
  std::string name;
  int sm = 0;  ///< compute capability
  std::vector<int> gpus;
};
/// Ordered by their first GPU; empty without a GPU.
std::vector<GpuKind> gpu_kinds();
/// "GPUs 0, 1 (NVIDIA H100, sm_90)" and a line for each feature.
std::string describe(const GpuKind& kind);

/// Copies bytes from each GPU to each other one and compares them.
/// @return what went wrong, a line for each pair; none: all is well.
std::vector<std::string> try_peer_copies();

}  // namespace flatshard
