#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flatshard/comm/collective_log.h"
#include "flatshard/comm/collective_observer.h"
#include "flatshard/comm/launch_order.h"
#include "flatshard/layout/placement.h"

namespace flatshard {

/// Rows [`begin`, `begin + rows`) of a tensor, along dimension 0, that are sent
/// to a rank of the group or received from it.
struct RowsOfPeer {
  int peer = 0;
  std::int64_t begin = 0;
  std::int64_t rows = 0;
};

/// One group of ranks for one purpose.
///
/// Every collective must be called by all ranks of the group in the same order.
/// Tensors are contiguous and on `device()`. Calls belong inside
/// `queue_collectives`: NCCL queues on the current CUDA stream and does not
/// block the host. Gloo blocks the calling thread until the data has arrived. A
/// call outside a stream runs after all that was queued before it.
///
/// A reduction returns bitwise identical results on all ranks. Gloo sums in
/// rank order, reduced float types in float32 with one rounding at the end.
/// `avg` multiplies the sum by 1 / size.
///
/// A group of one rank copies and never scales.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  at::Device device() const { return device_; }
  /// Returns null when the group launches as soon as it is called (GPUs, one
  /// rank).
  const std::shared_ptr<LaunchOrder>& launch_order() const { return order_; }

  /// All-gathers every rank's `in` into `out` in rank order.
  ///
  /// @param out [size * n] any dtype; overwritten.
  /// @param in  [n] same dtype. May alias `out` only at this rank's own slice,
  ///   which is then not written: a program may write it meanwhile.
  void all_gather(const at::Tensor& out, const at::Tensor& in);

  /// Runs several all-gathers in one launch. Dtypes may differ between pairs.
  void all_gather(
      std::span<const at::Tensor> outs,
      std::span<const at::Tensor> ins);

  /// Reduces every rank's `in` and leaves slice `rank()` of it in `out`.
  ///
  /// @param out [n] float or integer; overwritten. Must not overlap `in`.
  /// @param in  [size * n] same dtype; unchanged.
  void reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op);

  /// Runs several reduce-scatters in one launch.
  void reduce_scatter(
      std::span<const at::Tensor> outs,
      std::span<const at::Tensor> ins,
      ReduceOp op);

  /// Reduces `inout` over all ranks in place.
  void all_reduce(const at::Tensor& inout, ReduceOp op);

  /// Overwrites `tensor` with the values of rank `root`.
  void broadcast(const at::Tensor& tensor, int root);

  /// Sends rows to each rank, itself included, and receives rows from each, in
  /// one launch. The numbers of rows may differ, and may be 0.
  ///
  /// @param out       [rows, ...] any dtype; rows in `receives` are
  /// overwritten.
  /// @param in        [rows, ...] same dtype, as many bytes a row. Must not
  ///   overlap `out`.
  /// @param receives  parts of `out` that do not overlap.
  /// @param sends     parts of `in`. The parts that rank a sends to rank b have
  ///   the lengths of the parts that b receives from a, in the same order.
  ///   Parts without rows do not count.
  void all_to_all(
      const at::Tensor& out,
      const at::Tensor& in,
      std::span<const RowsOfPeer> receives,
      std::span<const RowsOfPeer> sends);

  /// Returns when all ranks have called it; blocks the host.
  void barrier();

  /// Orders the ranks' streams as barrier() orders hosts: data that a rank
  /// wrote to PeerMemory before its fence has arrived for the other ranks after
  /// their fence.
  void fence();

  /// Called after a failure, when ranks may have got to different places of
  /// their common work: all of them call it while their streams are idle.
  virtual void restart() {}
  /// Returns the bytes that it uses on the device itself.
  virtual std::int64_t nbytes() const { return 0; }

  /// Ends the group: collectives that still run on the device fail or stop.
  /// The communicator cannot be used afterwards.
  /// From any thread.
  void abort() { do_abort(); }

  /// Every later collective is appended to `log`; null for none.
  void set_log(std::shared_ptr<CollectiveLog> log) { log_ = std::move(log); }

  /// Observes every later collective. `group` names the ranks of this
  /// communicator: equal on them, on no others.
  void set_observer(
      std::shared_ptr<CollectiveObserver> observer,
      const std::string& group);

 protected:
  Communicator(int rank, int size, std::string name, at::Device device);
  /// Shares the order with `other`, the wrapped communicator: both launch on
  /// the same group.
  void share_launch_order(const Communicator& other) { order_ = other.order_; }

  using Tensors = std::vector<at::Tensor>;
  // Arguments are checked; each list has at least one non-empty tensor.
  virtual void do_all_gather(Tensors outs, Tensors ins) = 0;
  virtual void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) = 0;
  virtual void do_all_reduce(at::Tensor inout, ReduceOp op) = 0;
  virtual void do_broadcast(at::Tensor tensor, int root) = 0;
  using Parts = std::vector<RowsOfPeer>;
  /// The parts have rows.
  virtual void
  do_all_to_all(at::Tensor out, at::Tensor in, Parts receives, Parts sends) = 0;
  virtual void do_barrier() = 0;
  virtual void do_abort() {}
  /// Unless overridden, a small all-reduce.
  virtual void do_fence();
  /// Returns the collectives that the ranks of the group are about to launch,
  /// in rank order, where they differ and that would end the process. Empty
  /// when all agree, or the backend does not need the comparison. `mine` is
  /// this rank's collective.
  virtual std::vector<IssuedCollective> find_mismatch(
      const IssuedCollective& mine) {
    return {};
  }

  /// A barrier of `c` that its log and observer do not see.
  static void barrier_of(Communicator& c) { c.do_barrier(); }

  /// E.g. `rank 1/4 | dp.gather | all_gather`.
  std::string where(CollectiveKind kind) const;

 private:
  friend class ForwardingCommunicator;  // calls the do_ of another object

  template <class F>
  void run(
      CollectiveKind kind,
      std::span<const at::Tensor> tensors,
      int detail,
      F&& launch);
  template <class F>
  void run(CollectiveSignature signature, F&& launch);
  void compare(std::int64_t seq, const IssuedCollective& mine);
  void check_tensor(CollectiveKind kind, const char* role, const at::Tensor& t)
      const;
  /// Returns the `parts` that have rows.
  Parts check_parts(
      const char* role,
      const at::Tensor& tensor,
      std::span<const RowsOfPeer> parts) const;
  void check_pairs(
      CollectiveKind kind,
      std::span<const at::Tensor> large,
      std::span<const at::Tensor> small) const;

  int rank_;
  int size_;
  std::string name_;
  at::Device device_;
  std::shared_ptr<LaunchOrder> order_;
  std::shared_ptr<CollectiveLog> log_;
  std::shared_ptr<CollectiveObserver> observer_;
  int track_ = -1;
  std::int64_t num_launched_ = 0;
  at::Tensor fence_flag_;  ///< [1], what an all-reduce for a fence reduces
};

/// Aborts all of them at once, each from a separate thread: NCCL's abort waits
/// for the device, and there a collective of another group may wait forever.
/// Errors are logged.
void abort_together(
    const std::vector<std::shared_ptr<Communicator>>& communicators);

struct CommunicatorOptions {
  /// How long a rank waits for its peers, at creation and (Gloo) in each
  /// collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Gloo: ranks compare kind, size, dtype and unit of each collective before
  /// it runs, one small message more. Otherwise ranks that differ end the
  /// process from inside Gloo. Equal on all ranks.
  bool compare_collectives = true;
};

}  // namespace flatshard
