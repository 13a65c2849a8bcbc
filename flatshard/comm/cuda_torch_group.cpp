#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/stream.h"

namespace flatshard::detail {
namespace {

constexpr auto kPause = std::chrono::microseconds(200);

// NCCL without c10d: c10d's watchdog would end this process when the other
// program dies. The host polls instead of waiting in NCCL or CUDA, so an abort
// or the deadline ends each wait.
class NcclTorchGroup : public TorchGroup {
 public:
  NcclTorchGroup(const StoreHandle& store, TorchGroupOptions options)
      : options_(std::move(options)) {
    check(ncclGetUniqueId(&id_));
    // The key of the first communicator of c10d's ProcessGroupNCCL.
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(id_.internal);
    store->set(
        "0",
        std::vector<std::uint8_t>(bytes, bytes + sizeof(id_.internal)));
  }
  NcclTorchGroup(const NcclTorchGroup&) = delete;
  NcclTorchGroup& operator=(const NcclTorchGroup&) = delete;
  // An orderly end would wait for the other ranks.
  ~NcclTorchGroup() override { abort_comm(); }

  void broadcast(const at::Tensor& tensor) override {
    const CudaDeviceScope scope(options_.device);
    if (comm_ == nullptr) {
      connect();
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    check(ncclBroadcast(
        tensor.const_data_ptr(),
        tensor.data_ptr(),
        tensor.nbytes(),
        ncclUint8,
        /*root=*/0,
        comm_,
        stream));
    wait([&] { return state() == ncclSuccess; });
    Event sent;
    sent.record(*current_stream(options_.device));
    wait([&] { return state() == ncclSuccess && sent.query(); });
  }

  void abort() override { aborted_ = true; }

 private:
  void connect() {
    FLATSHARD_CHECK(
        !aborted_,
        comm,
        "{}: the group was aborted",
        options_.name);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check(ncclCommInitRankConfig(
        &comm_,
        options_.size,
        id_,
        /*rank=*/0,
        &config));
    wait([&] { return state() == ncclSuccess; });
  }

  ncclResult_t state() {
    ncclResult_t found = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &found));
    check(found);
    return found;
  }

  template <class F>
  void wait(F&& is_done) {
    while (!is_done()) {
      const bool late = std::chrono::steady_clock::now() > options_.deadline;
      if (aborted_ || late) {
        abort_comm();
        throw Error(
            late ? ErrorCode::timeout : ErrorCode::comm,
            late ? "a peer did not receive in time" : "the group was aborted",
            options_.name);
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  void check(ncclResult_t result) {
    if (result != ncclSuccess && result != ncclInProgress) {
      abort_comm();
      throw Error(
          ErrorCode::comm,
          fmt::format(
              "a peer or the network failed: NCCL: {}",
              ncclGetErrorString(result)),
          options_.name);
    }
  }

  void abort_comm() {
    aborted_ = true;
    if (comm_ != nullptr) {
      const CudaDeviceScope scope(options_.device);
      ncclCommAbort(std::exchange(comm_, nullptr));
    }
  }

  const TorchGroupOptions options_;
  ncclUniqueId id_{};
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::shared_ptr<TorchGroup> make_nccl_torch_group(
    const StoreHandle& store,
    const TorchGroupOptions& options) {
  return std::make_shared<NcclTorchGroup>(store, options);
}

}  // namespace flatshard::detail
