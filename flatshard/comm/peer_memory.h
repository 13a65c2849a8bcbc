#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "flatshard/comm/communicator.h"
#include "flatshard/comm/store.h"

namespace flatshard {

/// Memory of one size on every rank of a group, which all of them can read:
/// after a fence a rank reads what its peers wrote before it, without their
/// doing.
///
/// CPU: pages that the processes share. CUDA: memory that the GPUs map from
/// each other (torch's symmetric memory), so that copies between them are the
/// copy engines' and take no SM. What a rank that died has written stays
/// readable.
///
/// Nothing keeps a rank from overwriting what a peer still reads: between a
/// read and the next write of the same bytes the ranks need another collective.
class PeerMemory {
 public:
  /// Zeroed. Collective.
  ///
  /// @param store  of all ranks of `group`; only used with CUDA.
  /// @throws Error{config} when ranks are on different hosts or GPUs cannot
  ///   reach each other, on all ranks; Error{memory}.
  static std::unique_ptr<PeerMemory>
  create(Communicator& group, const StoreHandle& store, std::int64_t nbytes);
  virtual ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  /// [nbytes] uint8 on the group's device: the memory of rank `rank` of the
  /// group, to be written by that rank only. Valid while this object lives.
  const at::Tensor& of(int rank) const { return memory_.at(rank); }
  const at::Tensor& local() const { return of(rank()); }

  /// Later reads of every rank see what every rank wrote before its own call. A
  /// collective of the group; inside Stream::submit.
  void fence() const;

 protected:
  explicit PeerMemory(Communicator& group);

  std::vector<at::Tensor> memory_;  ///< by rank of the group

 private:
  std::shared_ptr<Communicator> group_;
  at::Tensor flag_;  ///< [1], what a fence reduces
};

}  // namespace flatshard
