#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>

#include "flatshard/comm/agree_on_id.h"
#include "flatshard/comm/backend.h"
#include "flatshard/comm/peer_memory.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

namespace flatshard::detail {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

class SymmetricPeers : public PeerMemory {
 public:
  SymmetricPeers(
      Communicator& group,
      const StoreHandle& store,
      std::int64_t nbytes)
      : PeerMemory(group), device_(group.device()), nbytes_(nbytes) {
    FLATSHARD_CHECK(
        store != nullptr,
        usage,
        "memory that ranks share needs a mesh with a store; "
        "Mesh::from_groups has none");
    // torch knows its groups by names; one of its own for each memory.
    const std::string name = "flatshard-" + agree_on_id(group);
    const c10::cuda::CUDAGuard guard(device_);
    with_comm_errors(
        fmt::format(
            "mapping the memory of peers of '{}' (all on one host, each on a "
            "GPU of its own that reaches the others; else copy_gathers = none "
            "and copy_reductions = false)",
            group.name()),
        [&] {
          symmetric_memory::set_group_info(
              name,
              rank(),
              size(),
              make_prefix_store(name, store));
          own_ = symmetric_memory::empty_strided_p2p(
              {std::max<std::int64_t>(nbytes, 1)},
              {1},
              at::kByte,
              device_,
              std::nullopt,
              std::nullopt);
          own_.zero_();
          peers_ = symmetric_memory::rendezvous(own_, name);
          for (int rank = 0; rank < size(); ++rank) {
            memory_.push_back(
                rank == this->rank()
                    ? own_.narrow(0, 0, nbytes)
                    : peers_->get_buffer(rank, {nbytes}, at::kByte, 0));
          }
        });
    count_memory_outside_allocator(device_, nbytes_);
  }

  ~SymmetricPeers() override {
    count_memory_outside_allocator(device_, -nbytes_);
  }

 private:
  at::Device device_;
  std::int64_t nbytes_;
  at::Tensor own_;
  c10::intrusive_ptr<symmetric_memory::SymmetricMemory> peers_;
};

}  // namespace

std::unique_ptr<PeerMemory> make_cuda_peer_memory(
    Communicator& group,
    const StoreHandle& store,
    std::int64_t nbytes) {
  return std::make_unique<SymmetricPeers>(group, store, nbytes);
}

}  // namespace flatshard::detail
