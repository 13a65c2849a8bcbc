#pragma once

#include "flatshard/plan/job.h"

#include <cstdint>
#include <vector>

namespace flatshard {

/// Kernels of a node between two exchanges of tensor parallelism.
struct Stage {
  enum class Reads {
    part,     ///< reads and writes the rank's own tokens or columns
    tokens,   ///< reads tokens of all ranks after an all-gather
    columns,  ///< its columns, and its results are summed and scattered
  };

  Reads reads = Reads::part;
  plan::NodeWork work;
  /// If `reads` is tokens: whether the backward all-gathers them again, for
  /// gradients of weights, and sums the gradient of its input.
  bool gathers_again = true;
  bool has_input_gradient = true;
  double runs = 1;  ///< runs over chunks of tokens, one after the other
};
using Stages = std::vector<Stage>;

/// Appends the kernels of stages that follow each other to a node.
void append_stages(const Stages& stages, plan::NodeWork& node);

/// Appends stages of layers that ranks share, with the exchanges of
/// nn::linears, nn::gated_linear and nn::Embedding. Kernels of the backward are
/// in its order, including kernels of weight gradients.
///
/// @param nbytes of the activations of all ranks, for one all-gather or
///   reduce-scatter.
/// @param parts copies overlap the first or last of this many parts of a
///   matmul; 1: matmuls are not split.
void append_shared_stages(
    const Stages& stages,
    double nbytes,
    std::int64_t parts,
    plan::NodeWork& node);

}  // namespace flatshard
