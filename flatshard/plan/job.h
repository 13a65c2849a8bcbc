#pragma once

#include "flatshard/plan/kernel.h"
#include "flatshard/plan/links.h"
#include "flatshard/schedule/overlap_events.h"
#include "flatshard/schedule/overlap_plan.h"
#include "flatshard/schedule/scheduler.h"
#include "flatshard/shape/unit_plan.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard::plan {

/// The work of one node of a model for a microbatch.
struct NodeWork {
  Kernels forward;
  Kernels backward;   ///< gradients of inputs
  Kernels wgrad;      ///< gradients of weights
  Kernels recompute;  ///< inside the backward, of a part of the node

  bool operator==(const NodeWork&) const = default;
};

/// A kind of layer: layers of one kind have equal shapes.
struct LayerWork {
  std::map<PlanNode, NodeWork> nodes;
  std::int64_t saved_nbytes = 0;  ///< activations from forward to backward
  std::int64_t input_nbytes = 0;  ///< saved by a recomputed layer
  /// Saved bytes that are in host memory from forward to backward.
  std::int64_t offloaded_nbytes = 0;
  std::int64_t transient_nbytes = 0;  ///< the most that its backward makes

  bool operator==(const LayerWork&) const = default;
};

/// Muon's work on the matrices of some units on the rank that has the most:
/// ranks send their parts, one rank orthogonalizes each matrix, and returns it.
struct MatrixWork {
  UnitId first = kNoUnit;       ///< starts before the update of this unit
  UnitId last = kNoUnit;        ///< ends with the update of this one
  double exchange_nbytes = 0;   ///< of the all-to-all, each way
  std::vector<AxisRanks> axes;  ///< whose ranks exchange
  Kernels kernels;
  std::int64_t directions_nbytes = 0;  ///< until the end
  std::int64_t scratch_nbytes = 0;     ///< during the exchange
};

/// A training run as numbers: the planner's input, independent of the formats
/// of configs and models.
struct Job {
  std::int64_t ranks = 1;
  std::int64_t ranks_per_host = 8;

  std::vector<UnitShape> units;  ///< by UnitId
  PlanUnits plan_units;
  SchedulerOptions scheduler;

  int microbatches = 1;
  OverlapPlanOptions overlap;  ///< in_flight = 1: one after the other
  LayerWork ends;              ///< the nodes embed and head
  std::vector<LayerWork> layer_kinds;
  std::vector<int> kind_of_layer;

  bool copy_forward_gathers = false;   ///< by copy engines
  bool copy_backward_gathers = false;  ///< likewise
  bool copy_reductions = false;        ///< likewise
  /// Bytes that a rank sends in one exchange of a layer's rows; 0: experts are
  /// on every rank.
  double exchange_nbytes = 0;
  std::vector<AxisRanks> exchange_axes;  ///< whose ranks exchange rows
  bool copy_exchange = false;
  /// Adjacent ranks that share layers. Kernel::exchange is between them.
  std::int64_t tensor_ranks = 1;
  bool copy_activations = false;  ///< between them
  /// Ranks that share sequences. Kernel::exchange by all-to-all is between
  /// them.
  std::int64_t context_ranks = 1;
  std::int64_t context_stride = 1;  ///< between adjacent ones
  /// Hosts that these ranks are on. Heads are exchanged inside one, and
  /// Kernel::over_hosts is between ranks with the same heads.
  std::int64_t context_hosts = 1;
  bool copy_heads = false;  ///< between them

  /// Bytes of the optimizer's states on the GPU, of the rank that has the most.
  std::int64_t state_nbytes = 0;
  std::int64_t host_state_nbytes = 0;  ///< likewise, in host memory
  /// Bytes of states that an update copies from the host and back, by UnitId.
  /// Empty: the states are on the GPU.
  std::vector<std::int64_t> copied_states;
  std::vector<Kernels> updates;  ///< the optimizer's passes, by UnitId
  std::vector<MatrixWork> matrices;
  /// Updates have their own stream: a unit's next all-gather or forward waits
  /// only for the update of this unit.
  bool overlap_updates = false;
  bool clips = true;    ///< computes the norm of all gradients
  bool graphs = false;  ///< units run as CUDA graphs
  /// Memory of a rank that belongs to no unit, by role.
  std::map<std::string, std::int64_t> other_nbytes;
  /// Memory that a send of the weights allocates between two steps; 0: none is
  /// sent.
  std::int64_t send_nbytes = 0;

  double tokens_per_rank = 0;  ///< per step
  /// FLOPs of forward and backward, by both conventions of models/flops.h.
  double flops_per_token = 0;
  double causal_flops_per_token = 0;
};

/// Bytes of a rank, with the roles of the memory table of a run's start.
struct RoleBytes {
  std::string role;
  std::int64_t nbytes = 0;
};

/// Returns a job's units with their layouts.
std::vector<UnitPlan> plan_units(const Job& job);

/// Returns the rows of the memory table.
std::vector<RoleBytes> memory_of(
    const Job& job,
    const std::vector<UnitPlan>& units);

}  // namespace flatshard::plan
