#include <ATen/Functions.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/comm/sum_rows.h"
#include "flatshard/comm/tensor_memory.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"

namespace flatshard::detail {
namespace {

// Up to this size an all-reduce is one all-gather and a local sum: one round
// trip instead of two.
constexpr std::int64_t kSmallAllReduceNumel = 4096;

// Gloo moves bytes here, and Flatshard computes the sums. Every dtype works.
// Addends are added in rank order, so N ranks equal one rank that accumulates N
// microbatches. float16 and bfloat16 round once. Gloo's own reduce-scatter is
// an all-reduce and would move twice as much.
class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(
      BackendHandle backend,
      const std::string& name,
      bool compare_collectives)
      : Communicator(
            backend->getRank(),
            backend->getSize(),
            name,
            at::Device(at::kCPU)),
        backend_(std::move(backend)),
        compare_collectives_(compare_collectives) {}

  void do_abort() override { abort_gloo_backend(*backend_); }

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
    const std::int64_t chunk = ceil_div(flat.numel(), size());
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

  // Gloo requires the rows for a rank in one piece.
  void do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends)
      override {
    const auto by_peer = [](const RowsOfPeer& a, const RowsOfPeer& b) {
      return a.peer < b.peer;
    };
    std::stable_sort(sends.begin(), sends.end(), by_peer);
    std::stable_sort(receives.begin(), receives.end(), by_peer);
    std::vector<std::int64_t> sent = rows_of_peers(sends);
    std::vector<std::int64_t> received = rows_of_peers(receives);
    at::Tensor from = staged(in, sum(sent));
    at::Tensor to = staged(out, sum(received));
    std::int64_t row = 0;
    for (const RowsOfPeer& part : sends) {
      from.narrow(0, row, part.rows)
          .copy_(as_rows(in).narrow(0, part.begin, part.rows));
      row += part.rows;
    }
    run(CollectiveKind::all_to_all,
        [&] { return backend_->alltoall_base(to, from, received, sent); });
    row = 0;
    for (const RowsOfPeer& part : receives) {
      as_rows(out)
          .narrow(0, part.begin, part.rows)
          .copy_(to.narrow(0, row, part.rows));
      row += part.rows;
    }
  }

  void do_barrier() override {
    run(CollectiveKind::barrier, [&] { return backend_->barrier(); });
  }

  // Gloo ends the process when a peer sends more than it has room for. So a
  // message of fixed size is sent first and describes what follows.
  std::vector<IssuedCollective> find_mismatch(
      const IssuedCollective& mine) override {
    if (!compare_collectives_) {
      return {};
    }
    const Announcement own = announce(mine);
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Announcement));
    const at::Tensor in = at::empty({kBytes}, at::kByte);
    const at::Tensor all = at::empty({size(), kBytes}, at::kByte);
    std::memcpy(in.mutable_data_ptr(), &own, sizeof(own));
    gather_bytes(all, in, mine.signature.kind);
    const auto* received = static_cast<const char*>(all.const_data_ptr());
    bool equal = true;
    for (int r = 0; r < size(); ++r) {
      const char* other = received + r * kBytes;
      equal = equal && std::memcmp(
                           other + kAgreedFrom,
                           reinterpret_cast<const char*>(&own) + kAgreedFrom,
                           sizeof(own) - kAgreedFrom) == 0;
    }
    return equal ? std::vector<IssuedCollective>() : issued(received);
  }

 private:
  // Trivial and without padding: it is compared and sent as bytes.
  struct Announcement {
    std::int64_t rank = 0;
    std::int64_t step = 0;
    // From here on all ranks must agree.
    std::int64_t kind = 0;
    std::int64_t numel = 0;
    std::int64_t dtype = 0;
    std::int64_t detail = 0;
    std::int64_t unit_length = 0;
    std::array<char, 72> unit{};  // its end: beginnings are often equal
  };
  static constexpr std::size_t kAgreedFrom = offsetof(Announcement, kind);

  static Announcement announce(const IssuedCollective& mine) {
    const CollectiveSignature& s = mine.signature;
    Announcement own{
        .rank = mine.rank,
        .step = mine.step,
        .kind = static_cast<std::int64_t>(s.kind),
        .numel = s.numel,
        .dtype = static_cast<std::int64_t>(s.dtype),
        .detail = s.detail,
        .unit_length = static_cast<std::int64_t>(s.unit.size())};
    const std::size_t length = std::min(s.unit.size(), own.unit.size());
    std::copy_n(s.unit.end() - length, length, own.unit.begin());
    return own;
  }

  std::vector<IssuedCollective> issued(const char* received) const {
    std::vector<IssuedCollective> all;
    for (int r = 0; r < size(); ++r) {
      Announcement other;
      std::memcpy(&other, received + r * sizeof(other), sizeof(other));
      const auto length = std::min<std::int64_t>(
          other.unit_length,
          static_cast<std::int64_t>(other.unit.size()));
      all.push_back(
          {.rank = static_cast<int>(other.rank),
           .step = other.step,
           .signature = {
               .kind = static_cast<CollectiveKind>(other.kind),
               .numel = other.numel,
               .dtype = static_cast<at::ScalarType>(other.dtype),
               .detail = static_cast<int>(other.detail),
               .unit = std::string(other.unit.data(), length)}});
    }
    return all;
  }

  template <class F>
  void run(CollectiveKind kind, F&& launch) {
    with_comm_errors(where(kind), [&] { launch_alone(launch)->wait(); });
  }

  template <class F>
  static auto launch_alone(F&& launch) {
    const std::lock_guard lock(gloo_launch_mutex());
    return launch();
  }

  void gather_bytes(
      const at::Tensor& out,
      const at::Tensor& in,
      CollectiveKind kind) {
    at::Tensor out_bytes = as_bytes(out);
    at::Tensor in_bytes = as_bytes(in);
    const std::int64_t n = in_bytes.numel();
    if (!overlap(in_bytes, out_bytes)) {
      run(kind, [&] { return backend_->_allgather_base(out_bytes, in_bytes); });
      return;
    }
    // _allgather_base also copies this rank's slice to `out`, at the end.
    // Writes there since the launch would be lost.
    std::vector<std::vector<at::Tensor>> slices(1);
    for (int r = 0; r < size(); ++r) {
      slices[0].push_back(
          r == rank() ? at::empty_like(in_bytes)
                      : out_bytes.narrow(0, r * n, n));
    }
    std::vector<at::Tensor> ins{in_bytes};
    run(kind, [&] { return backend_->allgather(slices, ins); });
  }

  // [rows, bytes]
  static at::Tensor as_rows(const at::Tensor& tensor) {
    const std::int64_t rows = tensor.size(0);
    return tensor.view({rows, rows == 0 ? 0 : tensor.numel() / rows})
        .view(at::kByte);
  }

  static at::Tensor staged(const at::Tensor& like, std::int64_t rows) {
    const std::int64_t nbytes = c10::multiply_integers(like.sizes().slice(1)) *
                                static_cast<std::int64_t>(like.element_size());
    return at::empty({rows, nbytes}, like.options().dtype(at::kByte));
  }

  std::vector<std::int64_t> rows_of_peers(const Parts& parts) const {
    std::vector<std::int64_t> rows(size());
    for (const RowsOfPeer& part : parts) {
      rows[part.peer] += part.rows;
    }
    return rows;
  }

  static std::int64_t sum(const std::vector<std::int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
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

  BackendHandle backend_;
  bool compare_collectives_;
};

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(
    BackendHandle backend,
    const std::string& name,
    const CommunicatorOptions& options) {
  return std::make_shared<GlooCommunicator>(
      std::move(backend),
      name,
      options.compare_collectives);
}

}  // namespace flatshard::detail
