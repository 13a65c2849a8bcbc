#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flatshard/comm/collective_log.h"
#include "flatshard/layout/placement.h"

namespace flatshard {

/// One group of ranks for one purpose.
///
/// Every collective must be called by all ranks of the group in the same
/// order. Tensors are contiguous and live on `device()`. Calls belong inside
/// `Stream::submit`: NCCL queues on the current CUDA stream and does not block
/// the host; Gloo blocks the calling thread until the data is there.
///
/// All ranks get the same bits from a reduction. Gloo sums in rank order,
/// reduced float types in float32 with one rounding at the end. `avg`
/// multiplies the sum by 1 / size.
///
/// A group of one rank copies and never scales.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  at::Device device() const { return device_; }

  /// Gathers every rank's `in` into `out` in rank order.
  ///
  /// @param out [size * n] any dtype; overwritten.
  /// @param in  [n] same dtype. May alias `out` only at this rank's own slice.
  void all_gather(const at::Tensor& out, const at::Tensor& in);

  /// Several all-gathers in one launch. Dtypes may differ between pairs.
  void all_gather(
      std::span<const at::Tensor> outs,
      std::span<const at::Tensor> ins);

  /// Reduces every rank's `in` and leaves slice `rank()` of it in `out`.
  ///
  /// @param out [n] float or integer; overwritten. Must not overlap `in`.
  /// @param in  [size * n] same dtype; unchanged.
  void reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op);

  /// Several reduce-scatters in one launch.
  void reduce_scatter(
      std::span<const at::Tensor> outs,
      std::span<const at::Tensor> ins,
      ReduceOp op);

  /// Reduces `inout` over all ranks in place.
  void all_reduce(const at::Tensor& inout, ReduceOp op);

  /// Overwrites `tensor` with that of rank `root`.
  void broadcast(const at::Tensor& tensor, int root);

  /// Returns when all ranks have called it; blocks the host.
  void barrier();

  /// Ends the group: collectives that still run on the device fail or stop.
  /// The communicator cannot be used afterwards.
  virtual void abort() {}

  /// Every later collective is appended to `log`; null for none.
  void set_log(std::shared_ptr<CollectiveLog> log) { log_ = std::move(log); }

 protected:
  Communicator(int rank, int size, std::string name, at::Device device)
      : rank_(rank), size_(size), name_(std::move(name)), device_(device) {}

  using Tensors = std::vector<at::Tensor>;
  // Arguments are checked; each list has at least one non-empty tensor.
  virtual void do_all_gather(Tensors outs, Tensors ins) = 0;
  virtual void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) = 0;
  virtual void do_all_reduce(at::Tensor inout, ReduceOp op) = 0;
  virtual void do_broadcast(at::Tensor tensor, int root) = 0;
  virtual void do_barrier() = 0;

 private:
  void record(CollectiveKind kind, std::span<const at::Tensor> tensors);
  void check_tensor(CollectiveKind kind, const char* role, const at::Tensor& t)
      const;
  void check_pairs(
      CollectiveKind kind,
      std::span<const at::Tensor> large,
      std::span<const at::Tensor> small) const;

  int rank_;
  int size_;
  std::string name_;
  at::Device device_;
  std::shared_ptr<CollectiveLog> log_;
};

struct CommunicatorOptions {
  /// How long a rank waits for its peers, at creation and (Gloo) in each
  /// collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

}  // namespace flatshard
