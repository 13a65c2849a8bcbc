#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "flatshard/comm/backend.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard::detail {
namespace {

c10d::ReduceOp nccl_op(ReduceOp op) {
  return op == ReduceOp::avg ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
}

constexpr auto kEndPatience = std::chrono::seconds(2);

// Aborts `backend`, unless that is done, and destroys it on a thread of its
// own, which is left behind when it takes long. The destructor joins torch's
// watchdog thread, and that sleeps for a minute after an error of NCCL, or
// waits for a store whose host hangs. Source: Watchdog::runLoop in torch's
// ProcessGroupNCCL.cpp.
void end_apart(BackendHandle backend, bool aborted, const std::string& name) {
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

// Every call uses asyncOp = false: NCCL's kernel then goes to the current
// stream, no work object is made, and nobody but that stream's owner keeps the
// tensors alive.
class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(
      BackendHandle backend,
      const std::string& name,
      at::Device device,
      bool owned)
      : Communicator(backend->getRank(), backend->getSize(), name, device),
        backend_(std::move(backend)),
        end_(owned ? End::shut_down : End::of_its_owner) {}

  // A group of our own is shut down with its peers; after an exception they
  // may never come, so it is aborted then. A wrapped one is its owner's.
  ~NcclCommunicator() override {
    const End end = end_;
    if (end == End::of_its_owner) {
      return;
    }
    if (end == End::aborted || std::uncaught_exceptions() > 0) {
      end_apart(std::move(backend_), end == End::aborted, name());
      return;
    }
    try {
      backend_->shutdown();
    } catch (const std::exception& error) {
      log_error("communicator '{}' ended badly: {}", name(), error.what());
    }
  }

  // May come from the watcher's thread while a collective is launched.
  void do_abort() override {
    End ours = End::shut_down;
    end_.compare_exchange_strong(ours, End::aborted);
    backend_->abort();
  }

  // NCCL connects an algorithm's peers at its first use, which would stall
  // the first step and allocate then.
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
    for (std::size_t i = 0; i < outs.size(); ++i) {
      outs[i] = as_bytes(outs[i]);
      ins[i] = as_bytes(ins[i]);
    }
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    run(CollectiveKind::all_gather, [&] {
      return outs.size() == 1
                 ? backend_->_allgather_base(outs[0], ins[0], options)
                 : backend_->allgather_into_tensor_coalesced(
                       outs,
                       ins,
                       options);
    });
  }

  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    c10d::ReduceScatterOptions options;
    options.reduceOp = nccl_op(op);
    options.asyncOp = false;
    run(CollectiveKind::reduce_scatter, [&] {
      return outs.size() == 1
                 ? backend_->_reduce_scatter_base(outs[0], ins[0], options)
                 : backend_->reduce_scatter_tensor_coalesced(
                       outs,
                       ins,
                       options);
    });
  }

  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    std::vector<at::Tensor> tensors{inout};
    c10d::AllreduceOptions options;
    options.reduceOp = nccl_op(op);
    options.asyncOp = false;
    run(CollectiveKind::all_reduce,
        [&] { return backend_->allreduce(tensors, options); });
  }

  void do_broadcast(at::Tensor tensor, int root) override {
    std::vector<at::Tensor> tensors{as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.asyncOp = false;
    run(CollectiveKind::broadcast,
        [&] { return backend_->broadcast(tensors, options); });
  }

  void do_barrier() override {
    const c10::cuda::CUDAGuard guard(device());
    do_all_reduce(at::zeros({1}, at::TensorOptions(device())), ReduceOp::sum);
    with_comm_errors(where(CollectiveKind::barrier), [] {
      c10::cuda::getCurrentCUDAStream().synchronize();
    });
  }

 private:
  template <class F>
  void run(CollectiveKind kind, F&& launch) {
    const c10::cuda::CUDAGuard guard(device());
    with_comm_errors(where(kind), [&] {
      // A backend that ignores asyncOp = false returns work; waiting makes
      // the current stream wait, not the host.
      if (const auto work = launch()) {
        work->wait();
      }
    });
  }

  /// What the destructor has to do.
  enum class End { shut_down, aborted, of_its_owner };

  BackendHandle backend_;
  std::atomic<End> end_;
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

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options) {
  check_indexed(name, device);
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
            device,
            /*owned=*/true);
        communicator->warm_up();
      });
  return communicator;
}

std::shared_ptr<Communicator> wrap_nccl_backend(
    BackendHandle backend,
    const std::string& name,
    at::Device device) {
  check_indexed(name, device);
  return std::make_shared<NcclCommunicator>(
      std::move(backend),
      name,
      device,
      /*owned=*/false);
}

}  // namespace flatshard::detail
