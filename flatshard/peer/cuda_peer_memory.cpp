#include <ATen/Functions.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"
#include "flatshard/peer/peer_backend.h"
#include "flatshard/peer/peer_memory.h"

namespace flatshard::detail {
namespace {

// A handle refers to the driver's entire block around the memory. The block is
// the memory itself when it fills its pages.
constexpr std::int64_t kPageNbytes = std::int64_t{2} << 20;

// A rank's description of its memory, sent as bytes.
struct IpcHandle {
  std::int64_t host = 0;
  std::int64_t pid = 0;
  bool allocated = false;
  cudaIpcMemHandle_t memory{};
};

class IpcMemory : public PeerMemory {
 public:
  IpcMemory(Communicator& group, std::int64_t nbytes)
      : PeerMemory(group), device_(group.device()) {
    const std::int64_t num_pages =
        ceil_div(std::max<std::int64_t>(nbytes, 1), kPageNbytes);
    nbytes_ = num_pages * kPageNbytes;
    const c10::cuda::CUDAGuard guard(device_);
    try {
      open(group, nbytes);
    } catch (...) {
      close();
      throw;
    }
    count_memory_outside_allocator(device_, nbytes_);
  }

  ~IpcMemory() override {
    count_memory_outside_allocator(device_, -nbytes_);
    close();
  }

 private:
  void open(Communicator& group, std::int64_t nbytes) {
    IpcHandle mine{.host = host_identity(), .pid = ::getpid()};
    mine.allocated =
        allocate() && cudaIpcGetMemHandle(&mine.memory, own_) == cudaSuccess;
    const auto handles = all_gather_values(group, mine);
    std::string failure;
    for (int rank = 0; rank < size(); ++rank) {
      const IpcHandle& theirs = handles[rank];
      check_one_host(theirs.host == mine.host, rank);
      FLATSHARD_CHECK(
          theirs.allocated,
          memory,
          "rank {} of '{}' has no {} bytes on its GPU to share, or its driver "
          "does not share memory between processes",
          rank,
          group.name(),
          nbytes_);
      FLATSHARD_CHECK(
          rank == this->rank() || theirs.pid != mine.pid,
          config,
          "memory that ranks share: expected a separate process for each rank, "
          "but ranks {} and {} of '{}' are in one",
          rank,
          this->rank(),
          group.name());
    }
    for (int rank = 0; rank < size() && failure.empty(); ++rank) {
      failure = map(handles[rank], nbytes, rank);
    }
    agree_on_success(group, failure);
  }

  bool allocate() {
    if (cudaMalloc(&own_, static_cast<std::size_t>(nbytes_)) != cudaSuccess) {
      // The allocator may cache free memory.
      (void)cudaGetLastError();
      c10::cuda::CUDACachingAllocator::emptyCache();
      if (cudaMalloc(&own_, static_cast<std::size_t>(nbytes_)) != cudaSuccess) {
        (void)cudaGetLastError();
        own_ = nullptr;
        return false;
      }
    }
    C10_CUDA_CHECK(cudaMemset(own_, 0, static_cast<std::size_t>(nbytes_)));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return true;
  }

  // Returns the error, or an empty text.
  std::string map(const IpcHandle& handle, std::int64_t nbytes, int rank) {
    void* begin = own_;
    if (rank != this->rank()) {
      const cudaError_t status = cudaIpcOpenMemHandle(
          &begin,
          handle.memory,
          cudaIpcMemLazyEnablePeerAccess);
      if (status != cudaSuccess) {
        (void)cudaGetLastError();
        return fmt::format(
            "cannot map {} bytes that rank {} shares on its GPU: {}",
            nbytes_,
            rank,
            cudaGetErrorString(status));
      }
      mapped_.push_back(begin);
    }
    memory_.push_back(
        at::for_blob(begin, {nbytes})
            .options(at::TensorOptions().dtype(at::kByte).device(device_))
            .target_device(device_)
            .make_tensor());
    return {};
  }

  // Errors are from a device that has failed before.
  void close() {
    const c10::cuda::CUDAGuard guard(device_);
    memory_.clear();
    (void)cudaDeviceSynchronize();
    for (void* const memory : mapped_) {
      (void)cudaIpcCloseMemHandle(memory);
    }
    (void)cudaFree(own_);
    (void)cudaGetLastError();
  }

  at::Device device_;
  std::int64_t nbytes_;
  void* own_ = nullptr;
  std::vector<void*> mapped_;  ///< of peers
};

// The place of a rank's GPU; sent as it is.
struct GpuPlace {
  std::int64_t host = 0;
  std::int64_t pid = 0;
  std::array<char, 32> bus_id{};  ///< empty: unknown
};

// From this rank's GPU.
bool linked(const GpuPlace& mine, const GpuPlace& theirs, int device) {
  int peer = -1;
  int native_atomics = 0;  // NVLink has them, PCIe has not
  const bool known =
      theirs.host == mine.host && theirs.pid != mine.pid &&
      cudaDeviceGetByPCIBusId(&peer, theirs.bus_id.data()) == cudaSuccess &&
      peer != device &&
      cudaDeviceGetP2PAttribute(
          &native_atomics,
          cudaDevP2PAttrNativeAtomicSupported,
          device,
          peer) == cudaSuccess;
  (void)cudaGetLastError();
  return known && native_atomics != 0;
}

}  // namespace

bool cuda_peers_are_linked(Communicator& group) {
  const int device = group.device().index();
  GpuPlace mine{.host = host_identity(), .pid = ::getpid()};
  if (cudaDeviceGetPCIBusId(
          mine.bus_id.data(),
          static_cast<int>(mine.bus_id.size()),
          device) != cudaSuccess) {
    (void)cudaGetLastError();
    mine.bus_id = {};
  }
  const auto places = all_gather_values(group, mine);
  bool all = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    all &= rank == group.rank() || linked(mine, places[rank], device);
  }
  const auto answers = all_gather_values(group, all ? 1 : 0);
  return std::ranges::count(answers, 0) == 0;
}

std::unique_ptr<PeerMemory> make_cuda_peer_memory(
    Communicator& group,
    std::int64_t nbytes) {
  return std::make_unique<IpcMemory>(group, nbytes);
}

}  // namespace flatshard::detail
