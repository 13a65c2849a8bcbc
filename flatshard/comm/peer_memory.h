#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"

namespace flatshard {

/// Memory of one size on every rank of a group, which all of them can read and
/// write. What a rank wrote is there for its peers after a collective of the
/// group that follows the write on the writer and goes before the read on the
/// reader: a fence. The same goes for overwriting what a peer reads.
///
/// CPU: pages that the processes share. CUDA: memory that the GPUs map from
/// each other (torch's symmetric memory), so that copies between them are the
/// copy engines' and take no SM. What a rank that died has written stays
/// readable.
class PeerMemory {
 public:
  /// Zeroed. Collective.
  ///
  /// @param store  of all ranks of `group`; only used with CUDA.
  /// @throws Error{config} when ranks are on different hosts or GPUs cannot
  ///   reach each other, on all ranks; Error{memory}.
  static std::unique_ptr<PeerMemory>
  create(Communicator& group, const StoreHandle& store, std::int64_t nbytes);
  virtual ~PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// [nbytes] uint8 on the group's device: the memory of rank `rank` of the
  /// group. Valid while this object lives.
  const at::Tensor& of(int rank) const { return memory_.at(rank); }
  const at::Tensor& local() const { return of(rank_); }

 protected:
  explicit PeerMemory(const Communicator& group)
      : rank_(group.rank()), size_(group.size()) {}

  std::vector<at::Tensor> memory_;  ///< by rank of the group

 private:
  int rank_;
  int size_;
};

}  // namespace flatshard
