#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flatshard/comm/collective_log.h"
#include "flatshard/comm/flight_recorder.h"
#include "flatshard/layout/placement.h"

namespace flatshard {

class CopyReducer;
class PeerFence;
struct StreamOptions;

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
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator();
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

  /// From now on reduce-scatters of float32, bfloat16 and float16 are copies
  /// into peers' memory and sums there (see CopyReducer), all of them from one
  /// stream; over NCCL, too, sums are then float32 with one rounding. The
  /// second call has no effect. Collective.
  ///
  /// @param nbytes  of memory on each rank, about.
  /// @throws Error{config, memory} as PeerMemory::create.
  /// @param stream  of the copies.
  void reduce_by_copies(std::int64_t nbytes, const StreamOptions& stream);
  /// See CopyReducer::restart.
  void restart_copies();
  /// The memory that it takes; 0 without.
  std::int64_t copy_nbytes() const;

  /// Reduces `inout` over all ranks in place.
  void all_reduce(const at::Tensor& inout, ReduceOp op);

  /// Overwrites `tensor` with that of rank `root`.
  void broadcast(const at::Tensor& tensor, int root);

  /// Returns when all ranks have called it; blocks the host.
  void barrier();

  /// Between the ranks' streams what barrier() is between hosts: what a rank
  /// wrote to PeerMemory before its fence is there for the others past theirs.
  void fence();
  /// From now on fences between GPUs are a PeerFence, where the ranks can have
  /// one. The second call has no effect. Collective.
  void fence_by_memory();

  /// Ends the group: collectives that still run on the device fail or stop.
  /// The communicator cannot be used afterwards.
  void abort();

  /// Every later collective is appended to `log`; null for none.
  void set_log(std::shared_ptr<CollectiveLog> log) { log_ = std::move(log); }

  /// Every later collective is recorded there, and its errors become the
  /// verdict of all ranks. `group` names the ranks of this communicator: equal
  /// on them, on no others.
  void set_flight_recorder(
      std::shared_ptr<FlightRecorder> recorder,
      const std::string& group);

 protected:
  Communicator(int rank, int size, std::string name, at::Device device);

  using Tensors = std::vector<at::Tensor>;
  // Arguments are checked; each list has at least one non-empty tensor.
  virtual void do_all_gather(Tensors outs, Tensors ins) = 0;
  virtual void do_reduce_scatter(Tensors outs, Tensors ins, ReduceOp op) = 0;
  virtual void do_all_reduce(at::Tensor inout, ReduceOp op) = 0;
  virtual void do_broadcast(at::Tensor tensor, int root) = 0;
  virtual void do_barrier() = 0;
  virtual void do_abort() {}
  /// Compares `mine` with the other ranks before the launch, where a mismatch
  /// would end the process. Empty: all agree.
  virtual std::optional<Verdict> disagreement(
      int world_rank,
      const FlightEntry& mine) {
    return std::nullopt;
  }

  /// E.g. "rank 1/4 | dp.gather | all_gather".
  std::string where(CollectiveKind kind) const;

 private:
  template <class F>
  void run(
      CollectiveKind kind,
      std::span<const at::Tensor> tensors,
      int detail,
      F&& launch);
  void do_fence();
  void compare(const FlightEntry& mine);
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
  std::shared_ptr<FlightRecorder> flight_;
  int flight_track_ = -1;
  std::int64_t num_launched_ = 0;
  std::unique_ptr<CopyReducer> copies_;    ///< null: the backend reduces
  std::unique_ptr<PeerFence> peer_fence_;  ///< null: fences are all-reduces
  std::atomic<PeerFence*> abortable_ = nullptr;  ///< the same, from any thread
  bool fences_chosen_ = false;
  at::Tensor fence_flag_;  ///< [1], what an all-reduce for a fence reduces
};

/// Aborts all of them at once, each from a thread of its own: NCCL's abort
/// waits for the device, on which a collective of another group may wait for
/// ever. Errors are logged.
void abort_together(
    const std::vector<std::shared_ptr<Communicator>>& communicators);

struct CommunicatorOptions {
  /// How long a rank waits for its peers, at creation and (Gloo) in each
  /// collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Gloo: ranks compare kind, size, dtype and unit of each collective before
  /// it runs, one small message more. Without, ranks that differ end the
  /// process from inside Gloo. Equal on all ranks.
  bool compare_collectives = true;
};

}  // namespace flatshard
