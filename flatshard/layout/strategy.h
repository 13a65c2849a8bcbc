#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "flatshard/layout/placement.h"

namespace flatshard {

/// How parameters, gradients and optimizer state are stored between their uses:
/// one placement per mesh axis each, outermost axis first. Plain data: the
/// named strategies below are constants of this type, and a program may write
/// its own.
///
/// | name                       | parameter | gradient     | optimizer |
/// |----------------------------|-----------|--------------|-----------|
/// | zero0, no_shard            | R         | Partial      | R         |
/// | zero1, optim               | R         | Partial      | S         |
/// | zero2, optim_grads         | R         | S            | S         |
/// | zero3, optim_grads_params  | S         | S            | S         |
/// | hsdp                       | R S       | Partial S    | R S       |
/// | hfsdp                      | R S       | Partial S    | S S       |
/// | hsdp_zero1                 | R R       | Partial both | R S       |
/// | hsdp_zero2                 | R R       | Partial S    | R S       |
///
/// The first four apply the same placement to every axis. The others need at
/// least two axes: axis 0 is the outer one, all further axes are inner ones.
/// Both names of a row mean the same everywhere.
/// Source: ZeRO, arXiv:1910.02054; HSDP as in PyTorch FSDP, arXiv:2304.11277.
struct Strategy {
  std::string name;
  Placements parameter;
  Placements gradient;
  Placements optimizer;

  /// Returns one of the strategies of the table, for a mesh with `num_axes`
  /// axes. `op` is the reduction of partial gradients.
  /// @throws Error{config} for an unknown name or too few axes.
  static Strategy
  named(std::string_view name, int num_axes, ReduceOp op = ReduceOp::avg);

  int num_axes() const { return static_cast<int>(parameter.size()); }

  /// The number of shards of the flat space: the product of the sizes of
  /// the axes that the optimizer state is sharded on (no list is sharded
  /// more).
  /// @param axis_sizes  ranks per mesh axis, outermost first.
  std::int64_t num_shards(std::span<const std::int64_t> axis_sizes) const;

  /// Checks that the lists fit together, and names the list and axis that do
  /// not. There is one entry per axis. The optimizer and the parameter are
  /// never Partial, the gradient never Replicate. If an axis shards the
  /// parameter, it also shards the gradient. If it shards the gradient, it also
  /// shards the optimizer. The sharded axes of each list are the innermost
  /// ones.
  /// @throws Error{config}
  void validate() const;

  bool operator==(const Strategy&) const = default;
};

/// One row of the table of named strategies.
struct StrategyName {
  std::string_view name;
  std::string_view other_name;  ///< in Megatron-FSDP; empty: none
  /// The strategy that keeps shards within the inner axes and replicates them
  /// along axis 0; empty: the strategy has an outer axis already.
  std::string_view with_replicas;
  /// A letter for the outer and one for the inner axes: Replicate, Partial,
  /// Shard.
  std::string_view parameter;
  std::string_view gradient;
  std::string_view optimizer;

  bool needs_outer_axis() const { return with_replicas.empty(); }
  /// Returns whether every rank keeps unsharded weights.
  bool keeps_whole_weights() const { return parameter == "RR"; }
  bool shards_nothing() const { return optimizer == "RR"; }
};

/// Returns the table, in its order.
std::span<const StrategyName> strategy_names();
/// @throws Error{config} for an unknown name, with those that exist.
const StrategyName& find_strategy_name(std::string_view name);

}  // namespace flatshard
