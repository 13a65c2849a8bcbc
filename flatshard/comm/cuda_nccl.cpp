#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <thread>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/cuda_scope.h"

namespace flatshard::detail {
namespace {

using NcclHandle = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

ncclRedOp_t nccl_op(ReduceOp op) {
  return op == ReduceOp::avg   ? ncclAvg
         : op == ReduceOp::max ? ncclMax
                               : ncclSum;
}

ncclDataType_t nccl_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:  // Communicator has checked
      FLATSHARD_THROW(
          usage,
          "NCCL does not reduce dtype {}",
          c10::toString(tensor.scalar_type()));
  }
}

constexpr auto kEndPatience = std::chrono::seconds(2);

// Aborts `backend`, unless that is done, and destroys it on a separate thread.
// The thread is abandoned after a timeout. The destructor joins torch's
// watchdog thread. That sleeps for a minute after an error of NCCL, or waits
// for a store on a host that hangs. Source: Watchdog::runLoop in torch's
// ProcessGroupNCCL.cpp.
void end_apart(NcclHandle backend, bool aborted, const std::string& name) {
  std::promise<void> ended;
  const std::future<void> end = ended.get_future();
  std::thread([backend = std::move(backend),
               ended = std::move(ended),
               aborted,
               name]() mutable {
    try {
      if (!aborted) {
        backend->abort();
      }
    } catch (const std::exception& error) {
      log_error("communicator '{}' ended badly: {}", name, error.what());
    }
    backend.reset();
    ended.set_value();
  }).detach();
  end.wait_for(kEndPatience);
}

// c10d connects the ranks, and ends the group. The collectives go straight to
// NCCL, on the current stream. c10d's own would each cost the host some tens of
// us more for its work objects, its flight recorder and its dispatch
// (docs/performance.md). Those are not used here: Communicator records, and
// streams order.
class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(
      NcclHandle backend,
      const std::string& name,
      at::Device device)
      : Communicator(backend->getRank(), backend->getSize(), name, device),
        backend_(std::move(backend)) {}

  // The group is shut down with its peers. After an exception they may never
  // reach this, so it is aborted then.
  ~NcclCommunicator() override {
    const bool aborted = aborted_;
    if (aborted || std::uncaught_exceptions() > 0) {
      end_apart(std::move(backend_), aborted, name());
      return;
    }
    try {
      backend_->shutdown();
    } catch (const std::exception& error) {
      log_error("communicator '{}' ended badly: {}", name(), error.what());
    }
  }

  // May run on the watcher's thread while a collective is launched.
  void do_abort() override {
    aborted_ = true;
    backend_->abort();
  }

  // NCCL connects an algorithm's peers at its first use. That would stall the
  // first step and allocate then.
  void warm_up() {
    const auto options = at::TensorOptions(device());
    const at::Tensor one = at::zeros({1}, options);
    const at::Tensor all = at::zeros({size()}, options);
    do_all_reduce(one, ReduceOp::sum);
    do_all_gather({all}, {one});
    do_reduce_scatter({one}, {all}, ReduceOp::sum);
    do_barrier();
  }

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override {
    run(CollectiveKind::all_gather, outs.size(), [&](auto i, auto c, auto s) {
      return ncclAllGather(
          ins[i].const_data_ptr(),
          outs[i].data_ptr(),
          ins[i].nbytes(),
          ncclUint8,
          c,
          s);
    });
  }

  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    const auto kind = CollectiveKind::reduce_scatter;
    run(kind, outs.size(), [&](auto i, auto c, auto s) {
      return ncclReduceScatter(
          ins[i].const_data_ptr(),
          outs[i].data_ptr(),
          outs[i].numel(),
          nccl_dtype(ins[i]),
          nccl_op(op),
          c,
          s);
    });
  }

  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    run(CollectiveKind::all_reduce, 1, [&](auto, auto c, auto s) {
      return ncclAllReduce(
          inout.const_data_ptr(),
          inout.data_ptr(),
          inout.numel(),
          nccl_dtype(inout),
          nccl_op(op),
          c,
          s);
    });
  }

  void do_broadcast(at::Tensor tensor, int root) override {
    run(CollectiveKind::broadcast, 1, [&](auto, auto c, auto s) {
      return ncclBroadcast(
          tensor.const_data_ptr(),
          tensor.data_ptr(),
          tensor.nbytes(),
          ncclUint8,
          root,
          c,
          s);
    });
  }

  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override {
    if (receives.empty() && sends.empty()) {
      return;
    }
    const std::int64_t row_nbytes =
        c10::multiply_integers(in.sizes().slice(1)) *
        static_cast<std::int64_t>(in.element_size());
    const auto* from = static_cast<const char*>(in.const_data_ptr());
    auto* to = static_cast<char*>(out.data_ptr());
    const auto kind = CollectiveKind::all_to_all;
    // A single send or receive to or from another rank is a group too.
    run(kind,
        sends.size() + receives.size(),
        [&](std::size_t i, auto c, auto s) {
          const bool is_send = i < sends.size();
          const RowsOfPeer& part =
              is_send ? sends[i] : receives[i - sends.size()];
          const std::int64_t begin = part.begin * row_nbytes;
          const std::size_t count = part.rows * row_nbytes;
          return is_send
                     ? ncclSend(from + begin, count, ncclUint8, part.peer, c, s)
                     : ncclRecv(to + begin, count, ncclUint8, part.peer, c, s);
        });
  }

  void do_barrier() override {
    const c10::cuda::CUDAGuard guard(device());
    do_all_reduce(at::zeros({1}, at::TensorOptions(device())), ReduceOp::sum);
    with_comm_errors(where(CollectiveKind::barrier), [] {
      c10::cuda::getCurrentCUDAStream().synchronize();
    });
  }

 private:
  /// Calls launch(i, comm, stream) for each i < n, as one launch.
  template <class F>
  void run(CollectiveKind kind, std::size_t n, F&& launch) {
    const CudaDeviceScope scope(device());
    const ncclComm_t comm = connected(kind);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    if (n == 1) {
      check(kind, comm, launch(0, comm, stream));
      return;
    }
    check(kind, comm, ncclGroupStart());
    ncclResult_t first = ncclSuccess;
    for (std::size_t i = 0; i < n && first == ncclSuccess; ++i) {
      first = launch(i, comm, stream);
    }
    // A group that was started has to end, or the thread stays in it.
    const ncclResult_t end = ncclGroupEnd();
    check(kind, comm, first == ncclSuccess ? end : first);
  }

  /// c10d connects at the first collective, and can at no other time.
  ncclComm_t connected(CollectiveKind kind) {
    if (aborted_) {
      throw Error(ErrorCode::comm, "it was aborted", where(kind));
    }
    try {
      std::int64_t comm = backend_->getCommPtr();
      if (comm == 0) {
        std::vector<at::Tensor> one{
            at::zeros({1}, at::TensorOptions(device()))};
        backend_->allreduce(one, {})->wait();
        comm = backend_->getCommPtr();
      }
      return reinterpret_cast<ncclComm_t>(comm);
    } catch (const std::exception&) {
      with_comm_errors(where(kind), [] { throw; });
      throw;
    }
  }

  void check(CollectiveKind kind, ncclComm_t comm, ncclResult_t result) const {
    while (result == ncclInProgress) {  // a communicator that does not block
      const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
      result = asked == ncclSuccess ? result : asked;
    }
    if (result != ncclSuccess) {
      throw Error(
          ErrorCode::comm,
          fmt::format(
              "a peer or the network failed: NCCL: {}: {}",
              ncclGetErrorString(result),
              ncclGetLastError(comm)),
          where(kind));
    }
  }

  NcclHandle backend_;
  std::atomic<bool> aborted_ = false;
};

void check_indexed(const std::string& name, at::Device device) {
  FLATSHARD_CHECK(
      device.has_index(),
      config,
      "communicator '{}': expected a GPU with an index such as cuda:0, got "
      "'{}'",
      name,
      device.str());
}

// In a graph NCCL would register the buffers of its collectives. All ranks of a
// group would have to capture and replay alike: a rank that runs one step
// without its graph would wait forever. Read by NCCL once; a value that the
// user set stays.
void keep_buffers_out_of_graphs() {
  ::setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options) {
  check_indexed(name, device);
  keep_buffers_out_of_graphs();
  std::shared_ptr<NcclCommunicator> communicator;
  with_comm_errors(
      fmt::format("rank {}/{} | {} | connect", rank, size, name),
      [&] {
        const c10::cuda::CUDAGuard guard(device);
        auto nccl = c10d::ProcessGroupNCCL::Options::create(
            /*is_high_priority_stream=*/true);
        nccl->timeout = options.timeout;
        communicator = std::make_shared<NcclCommunicator>(
            c10::make_intrusive<c10d::ProcessGroupNCCL>(
                std::move(store),
                rank,
                size,
                std::move(nccl)),
            name,
            device);
        communicator->warm_up();
      });
  return communicator;
}

}  // namespace flatshard::detail
