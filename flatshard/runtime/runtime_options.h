#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/runtime/comm_streams.h"
#include "flatshard/runtime/copy_engines.h"
#include "flatshard/runtime/debug_options.h"
#include "flatshard/runtime/graph_options.h"
#include "flatshard/schedule/scheduler.h"

namespace flatshard {

/// How a Runtime runs a step: what a program chooses for a model.
struct RuntimeOptions {
  /// Units unsharded ahead.
  int prefetch = 1;
  /// false: weights stay unsharded from forward to backward.
  bool reshard_after_forward = true;
  /// If this sets gathers, the groups have GroupSpec::peers_read, as
  /// fully_shard ensures.
  CopyEngines copy_engines;
  /// Weights are written by programs that do not call WeightReaders::wait
  /// (WeightPlanes::mark_foreign_write reports it afterwards): a forward
  /// without a backward ends when no copy engine reads weights any more.
  bool foreign_writes = false;
  /// Each all-gather and each reduction allocates its slot and frees it
  /// afterwards. Otherwise a plan gives it a place in one arena that exists all
  /// the time. Addresses change from step to step. At the end of a forward,
  /// where activations and logits are largest, no gradient slot exists.
  bool slots_on_demand = false;
  /// Stores the tensors that recomputed parts keep between their two runs in
  /// host memory (nn/recompute.h). Not with graphs, and not for units whose
  /// caller runs them in pieces.
  bool offload_activations = false;
  /// After a backward GradientPipeline::contributed returns the parameters with
  /// a gradient on some rank. A group without a gradient on any rank has none,
  /// as parameters of torch have. Otherwise, and where another rank got one, a
  /// rank without a gradient counts zeros. Costs an all-reduce of a flag per
  /// parameter at the end of a backward. The host waits for it only if this
  /// rank got no gradient for some parameter.
  bool unused_grads_stay_undefined = false;
  /// Delays for tests; the names of the streams are part of the seed.
  StreamOptions streams;
  /// Keep every event and action since the last clear_trace (tests, reports).
  bool trace = false;
  /// fully_shard attaches the observers that carry these out.
  DebugOptions debug;
  GraphOptions graphs;
  /// Streams that several Runtimes on one device share, and with them the
  /// memory that torch's allocator keeps for each stream. Null: its own.
  std::shared_ptr<CommStreams> shared_streams;

  /// Returns the policy of units without a separate policy.
  UnitPolicy unit_policy() const {
    return {.reshard_after_forward = reshard_after_forward};
  }
  SchedulerOptions scheduler() const { return {.prefetch = prefetch}; }
};

}  // namespace flatshard
