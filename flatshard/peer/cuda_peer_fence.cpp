#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "flatshard/comm/all_gather_values.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/cuda_driver.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/stream.h"
#include "flatshard/peer/peer_backend.h"

namespace flatshard::detail {
namespace {

using Operation = CUstreamBatchMemOpParams;

constexpr std::int64_t kCountNbytes = 64;  // each writer has a cache line
// Greater than every count that a peer has written, also for the driver: it
// compares by the sign of a difference.
constexpr std::uint32_t kReleased = std::uint32_t{1} << 30;

// The memory of rank r has the counts that r's peers write for it.
class StreamMemoryFence : public PeerFence {
 public:
  StreamMemoryFence(
      const Communicator& group,
      std::unique_ptr<PeerMemory> counts)
      : device_(group.device()),
        counts_(std::move(counts)),
        run_(find_stream_batch_mem_op()) {}

  ~StreamMemoryFence() override {
    release();  // what comes next waits for the device
    const c10::cuda::CUDAGuard guard(device_);
    (void)cudaDeviceSynchronize();
    for (void* const memory : registered_) {
      (void)cudaHostUnregister(memory);
    }
    (void)cudaGetLastError();
  }

  // Once, before the first fence. False: the device cannot do it.
  bool open() {
    const c10::cuda::CUDAGuard guard(device_);
    const int rank = counts_->rank();
    for (int r = 0; r < counts_->size(); ++r) {
      void* there = nullptr;
      if (!map(counts_->of(r), &there)) {
        (void)cudaGetLastError();
        return false;
      }
      const auto begin = reinterpret_cast<CUdeviceptr>(there);
      if (r != rank) {
        Operation write{};
        write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.writeValue.address = begin + rank * kCountNbytes;
        write.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
        writes_.push_back(write);
        continue;
      }
      for (int peer = 0; peer < counts_->size(); ++peer) {
        if (peer != rank) {
          Operation wait{};
          wait.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
          wait.waitValue.address = begin + peer * kCountNbytes;
          wait.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
          waits_.push_back(wait);
        }
      }
    }
    return run_ != nullptr;
  }

  void fence() override {
    const CudaDeviceScope scope(device_);
    const std::shared_ptr<Stream> here = current_stream(device_);
    last_.wait(*here);
    const std::uint32_t count = ++count_;
    std::vector<Operation> all;
    all.reserve(writes_.size() + waits_.size());
    for (Operation write : writes_) {
      write.writeValue.value = count;
      all.push_back(write);
    }
    for (Operation wait : waits_) {
      wait.waitValue.value = count;
      all.push_back(wait);
    }
    FLATSHARD_CHECK(
        !released_,
        comm,
        "a fence between GPUs: the group was aborted");
    const CUresult status = run_(
        c10::cuda::getCurrentCUDAStream(device_.index()).stream(),
        static_cast<unsigned>(all.size()),
        all.data(),
        0);
    FLATSHARD_CHECK(
        status == CUDA_SUCCESS,
        comm,
        "a fence between GPUs: the driver refused it with error {}; use "
        "collectives instead (copy engines: none)",
        static_cast<int>(status));
    last_.record(*here);
  }

  void release() override {
    released_ = true;
    const std::uint32_t value = count_ + kReleased;
    auto* const mine = static_cast<char*>(counts_->local().mutable_data_ptr());
    for (int peer = 0; peer < counts_->size(); ++peer) {
      auto* const count = mine + peer * kCountNbytes;
      std::atomic_ref(*reinterpret_cast<std::uint32_t*>(count)).store(value);
    }
  }

 private:
  bool map(const at::Tensor& memory, void** there) {
    void* const here = memory.mutable_data_ptr();
    if (cudaHostRegister(here, memory.nbytes(), cudaHostRegisterMapped) !=
        cudaSuccess) {
      return false;
    }
    registered_.push_back(here);
    return cudaHostGetDevicePointer(there, here, 0) == cudaSuccess;
  }

  at::Device device_;
  std::unique_ptr<PeerMemory> counts_;
  StreamBatchMemOp run_;
  std::vector<void*> registered_;
  std::vector<Operation> writes_;
  std::vector<Operation> waits_;
  std::atomic<std::uint32_t> count_ = 0;
  std::atomic<bool> released_ = false;
  Event last_;  ///< past the last fence
};

}  // namespace

std::unique_ptr<PeerFence> make_cuda_peer_fence(Communicator& group) {
  std::unique_ptr<PeerMemory> counts;
  try {
    counts = make_shared_pages(group, group.size() * kCountNbytes);
  } catch (const Error& error) {  // on all ranks
    log_debug("fences of '{}' are collectives: {}", group.name(), error.what());
    return nullptr;
  }
  auto fence = std::make_unique<StreamMemoryFence>(group, std::move(counts));
  const auto opened = all_gather_values(group, fence->open() ? 1 : 0);
  if (std::ranges::count(opened, 0) > 0) {
    return nullptr;
  }
  return fence;
}

}  // namespace flatshard::detail
