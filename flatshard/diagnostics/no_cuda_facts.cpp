// Stands in for cuda_facts.cpp in a build without CUDA.
#include "flatshard/diagnostics/cuda_facts.h"

namespace flatshard::detail {

std::vector<Fact> cuda_library_facts() {
  return {};
}

std::vector<Fact> cuda_driver_facts() {
  return {};
}

double cuda_memory_nbytes(at::Device /*gpu*/) {
  return 0;
}

PeerLink cuda_peer_link(int /*from*/, int /*to*/) {
  return PeerLink::none;
}

}  // namespace flatshard::detail
