#include <ATen/Functions.h>

#include "flatshard/comm/backend.h"
#include "flatshard/core/error.h"

namespace flatshard::detail {
namespace {

// Up to this size an all-reduce is one gather and a local sum: one round trip
// instead of two.
constexpr std::int64_t kSmallAllReduceNumel = 4096;

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

// Gloo moves bytes here and the sums are our own: every dtype works, addends
// are taken in rank order (so N ranks equal one rank that accumulates N
// microbatches), and float16 and bfloat16 round once. Gloo's own
// reduce-scatter is an all-reduce and would move twice as much.
class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(BackendHandle backend, const std::string& name)
      : Communicator(
            backend->getRank(),
            backend->getSize(),
            name,
            at::Device(at::kCPU)),
        backend_(std::move(backend)) {}

  void abort() override { backend_->abort(); }

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override {
    for (std::size_t i = 0; i < outs.size(); ++i) {
      gather_bytes(outs[i], ins[i], CollectiveKind::all_gather);
    }
  }

  void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) override {
    for (std::size_t i = 0; i < outs.size(); ++i) {
      scatter_sum(outs[i].view({-1}), ins[i], op);
    }
  }

  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    const at::Tensor flat = inout.view({-1});
    if (flat.numel() <= kSmallAllReduceNumel) {
      const at::Tensor all = at::empty({size(), flat.numel()}, flat.options());
      gather_bytes(all, flat, CollectiveKind::all_reduce);
      sum_rows(flat, all, op);
      return;
    }
    const std::int64_t chunk = (flat.numel() + size() - 1) / size();
    at::Tensor padded = flat;
    if (flat.numel() != chunk * size()) {
      padded = at::zeros({chunk * size()}, flat.options());
      padded.narrow(0, 0, flat.numel()).copy_(flat);
    }
    const at::Tensor mine = at::empty({chunk}, flat.options());
    scatter_sum(mine, padded, op);
    gather_bytes(padded, mine, CollectiveKind::all_reduce);
    if (!padded.is_same(flat)) {
      flat.copy_(padded.narrow(0, 0, flat.numel()));
    }
  }

  void do_broadcast(at::Tensor tensor, int root) override {
    std::vector<at::Tensor> tensors{as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    run(CollectiveKind::broadcast,
        [&] { return backend_->broadcast(tensors, options); });
  }

  void do_barrier() override {
    run(CollectiveKind::barrier, [&] { return backend_->barrier(); });
  }

 private:
  template <class F>
  void run(CollectiveKind kind, F&& launch) {
    with_comm_errors(
        fmt::format(
            "rank {}/{} | {} | {}",
            rank(),
            size(),
            name(),
            to_string(kind)),
        [&] { launch()->wait(); });
  }

  void gather_bytes(
      const at::Tensor& out,
      const at::Tensor& in,
      CollectiveKind kind) {
    at::Tensor out_bytes = as_bytes(out);
    at::Tensor in_bytes = as_bytes(in);
    run(kind, [&] { return backend_->_allgather_base(out_bytes, in_bytes); });
  }

  // out [n] = sum over ranks of slice rank() of in [size * n].
  void scatter_sum(const at::Tensor& out, const at::Tensor& in, ReduceOp op) {
    const at::Tensor all = at::empty({size(), out.numel()}, out.options());
    at::Tensor all_bytes = as_bytes(all);
    at::Tensor in_bytes = as_bytes(in);
    std::vector<std::int64_t> equal_splits;
    run(CollectiveKind::reduce_scatter, [&] {
      return backend_
          ->alltoall_base(all_bytes, in_bytes, equal_splits, equal_splits);
    });
    sum_rows(out, all, op);
  }

  // out [n] = rows [size, n] added in rank order.
  void sum_rows(const at::Tensor& out, const at::Tensor& rows, ReduceOp op) {
    const bool direct = sum_dtype(out.scalar_type()) == out.scalar_type();
    const at::Tensor sum =
        direct ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
    sum.copy_(rows.select(0, 0));
    for (int r = 1; r < size(); ++r) {
      sum.add_(rows.select(0, r));
    }
    if (op == ReduceOp::avg) {
      sum.mul_(1.0 / size());
    }
    if (!direct) {
      out.copy_(sum);
    }
  }

  BackendHandle backend_;
};

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(
    BackendHandle backend,
    const std::string& name) {
  return std::make_shared<GlooCommunicator>(std::move(backend), name);
}

}  // namespace flatshard::detail
