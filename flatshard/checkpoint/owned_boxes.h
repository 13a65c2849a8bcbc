#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/group/param_group.h"
#include "flatshard/optim/optimizer.h"

namespace flatshard {

/// The role of tensors that are replicated on every rank.
inline constexpr std::string_view kBufferRole = "buffer";

/// A tensor that is not sharded, e.g. a module's buffer: rank 0's values are
/// saved, and every rank loads them.
struct WholeTensor {
  std::string name;
  at::Tensor tensor;  ///< contiguous
};

/// A box of one checkpoint tensor that this rank stores.
struct OwnedBox {
  std::string role;                 ///< kWeightRole, or an optimizer state
  std::vector<std::string> names;   ///< the main name first; tied ones follow
  std::vector<std::int64_t> shape;  ///< of the unsharded tensor
  Rectangle box;                    ///< in the unsharded tensor, if n > 0
  /// [n], n >= 0: the box in row-major order, a view of the flat shard.
  at::Tensor values;
};

/// Returns weights, optimizer state and replicated tensors of this rank. Every
/// tensor occurs, with n = 0 if the rank stores no element of it.
///
/// @param optimizer  null: weights only.
/// @throws Error{usage} for a replicated tensor that is not contiguous.
std::vector<OwnedBox> owned_boxes(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole = {});

/// The same with replicated elements divided evenly among their replicas, so
/// that all ranks together write every element once.
///
/// @param rank  of this process among all; 0 writes the replicated tensors.
std::vector<OwnedBox> boxes_to_write(
    const std::vector<ParamGroup*>& groups,
    const Optimizer* optimizer,
    const std::vector<WholeTensor>& whole = {},
    int rank = 0);

}  // namespace flatshard
