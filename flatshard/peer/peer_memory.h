#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flatshard/comm/communicator.h"

namespace flatshard {

/// Returns a number that processes on one host have in common.
std::int64_t host_identity();

/// Memory of one size on every rank of a group. All of them can read and write
/// it. A rank's writes are visible to its peers after a fence: a collective of
/// the group that follows the write on the writer and precedes the read on the
/// reader. The same applies to overwriting data that a peer reads.
///
/// CPU: pages that the processes share. CUDA: memory that the GPUs map from
/// each other's processes (CUDA IPC), so that copies between them use the copy
/// engines and no SM. Data that a dead rank has written stays readable.
class PeerMemory {
 public:
  /// Zeroed. Collective.
  ///
  /// @throws Error{config} when ranks are on different hosts or cannot reach
  ///   each other's memory, Error{memory}; on all ranks.
  static std::unique_ptr<PeerMemory> create(
      Communicator& group,
      std::int64_t nbytes);
  /// Returns whether the group's GPUs can share memory and NVLink joins each
  /// with each: then copies beat collectives. The same on all ranks; false on
  /// CPUs. Collective.
  static bool has_fast_links(Communicator& group);
  virtual ~PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// [nbytes] uint8 on the group's device: the memory of rank `rank` of the
  /// group. Valid while this object exists.
  const at::Tensor& of(int rank) const { return memory_.at(rank); }
  const at::Tensor& local() const { return of(rank_); }

 protected:
  explicit PeerMemory(const Communicator& group)
      : rank_(group.rank()), size_(group.size()) {}

  /// @param same  whether rank `rank` is where this one is. When two ranks are
  ///   in different places, both find the other.
  void check_one_host(bool same, int rank) const;
  /// Throws on all ranks when one has a failure to report. Past it every rank
  /// has mapped all memory. Collective.
  static void agree_on_success(Communicator& group, const std::string& failure);

  std::vector<at::Tensor> memory_;  ///< by rank of the group

 private:
  int rank_;
  int size_;
};

}  // namespace flatshard
