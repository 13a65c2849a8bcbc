#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/group/parameter_placement.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/nn/linear.h"

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace flatshard {

struct TensorParallelOptions {
  /// Activations are copied between ranks of one host (PeerTensorParallel).
  /// CUDA graphs cannot record that. False: collectives exchange them.
  bool copies = false;
  /// The window of copies; see PeerTensorParallelOptions.
  std::int64_t window_nbytes = 0;
  /// Options of the stream of transfers that overlap.
  StreamOptions stream;
};

/// Returns the ranks along an axis of the mesh in the form that layers accept;
/// null for an axis of one rank. Collective.
/// @throws Error{usage} for a mesh without the axis, Error{config} when ranks
///   that copy are on different hosts.
nn::TensorParallelPtr make_tensor_parallel(
    Mesh& mesh,
    const std::string& axis = "tp",
    const TensorParallelOptions& options = {});

/// How nn::Linear layers are split, by the ends of their dotted names: "up" is
/// `up`, `blocks.0.up` and so on.
using TensorParallelPlan = std::map<std::string, nn::LinearCut>;

/// Splits the layers of `plan` below `root` over an axis of the mesh. Call it
/// before fully_shard, while the parameters have no memory.
///
/// From then on a column-parallel layer reads this rank's tokens and
/// all-gathers the others', and a row-parallel layer returns this rank's
/// tokens. So a pair of them maps [batch, seq / ranks, dim] to the same shape.
/// The loss of a rank is an addend: the mean over all tokens divides each
/// rank's mean by the number of ranks.
///
/// @param root  the module that is passed to fully_shard.
/// @return      FullyShardOptions::placement_of; see placement_of_parts.
/// @throws Error{config} naming an entry of the plan that no layer has, or a
///   dimension that the ranks do not divide.
std::function<ParameterPlacement(const std::string& name)> tensor_parallel(
    torch::nn::Module& root,
    Mesh& mesh,
    const TensorParallelPlan& plan,
    const std::string& axis = "tp",
    const TensorParallelOptions& options = {});

/// Returns FullyShardOptions::placement_of for a module with layers that are
/// split along an axis of the mesh (nn::LinearOptions::ranks and its like).
///
/// A split parameter is sharded over the other axes, and its gradient is the
/// mean over them. A parameter that is replicated on each rank is sharded over
/// all axes. Each rank of `axis` reads other tokens. So its gradient is the sum
/// over `axis` and the mean over the other axes, by the group's own reduction.
///
/// @param root  the module that is passed to fully_shard.
/// @param mesh  of the model; needs an axis in addition to `axis`.
/// @throws Error{config, usage} for a mesh without these axes.
std::function<ParameterPlacement(const std::string& name)> placement_of_parts(
    torch::nn::Module& root,
    const Mesh& mesh,
    const std::string& axis = "tp");

}  // namespace flatshard
