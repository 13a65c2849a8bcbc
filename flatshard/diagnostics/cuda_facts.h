#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "flatshard/diagnostics/machine.h"

// The link-time choice inside this folder: cuda_facts.cpp or no_cuda_facts.cpp.
namespace flatshard::detail {

std::vector<Fact> cuda_library_facts();
std::vector<Fact> cuda_driver_facts();
double cuda_memory_nbytes(at::Device gpu);

enum class PeerLink { none, pcie, nvlink };
PeerLink cuda_peer_link(int from, int to);

}  // namespace flatshard::detail
