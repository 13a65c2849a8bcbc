#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/group/group_options.h"
#include "flatshard/layout/local_range.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard {

/// One rank's slice of a group's all-gathered compute weights, as it is kept
/// from a forward to its backward (ParamGroupOptions::post_forward_ranks).
/// Adjacent ranks on the innermost sharded axis of data, as many as the option
/// sets, have all slices together. So the backward's all-gather stays among
/// them, for example inside a host.
///
/// It has the place of the slice. Its memory is the Executor's slot.
class PostForwardShard {
 public:
  /// Returns null when the group's weights are sharded over no more ranks than
  /// these. Creates a process group, so call it in the same order on all ranks.
  /// @param context  with post_forward_ranks, of a group whose weights are
  ///   sharded.
  /// @throws Error{config} naming the option where it does not fit the mesh.
  static std::unique_ptr<PostForwardShard> make(const GroupContext& context);

  /// Returns the number of elements of the slice.
  std::int64_t numel() const { return numel_; }
  /// Copies the slice out of the full weights, on the current stream.
  /// @param whole  [layout.numel()]
  /// @param shard  [numel()] of the same dtype; overwritten.
  void save(const at::Tensor& whole, const at::Tensor& shard) const;
  /// All-gathers the slices of the adjacent ranks. Called inside
  /// Stream::submit, see queue_collectives.
  /// @param shard  [numel()]
  /// @param whole  [layout.numel()] of the same dtype; overwritten.
  void gather(const at::Tensor& shard, const at::Tensor& whole) const;

 private:
  PostForwardShard(
      Communicator& neighbours,
      std::int64_t numel,
      std::vector<LocalRange> slices,
      std::vector<LocalRange> segments);

  Communicator& neighbours_;  ///< owned by the mesh
  std::int64_t numel_;
  std::vector<LocalRange> slices_;    ///< one per segment
  std::vector<LocalRange> segments_;  ///< full segments
};

}  // namespace flatshard
